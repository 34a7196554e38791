"""Comparison of a memory of a text with the text itself.

The prefix of a run of `remember` is measured against nothing, the beginning of the text
in as many positions, and the whole text.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Array, Float
from rich.table import Table

from prompt_tuning.adapters.adapter import PREFIX_PATH
from prompt_tuning.config.run import Run
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.layer_kinds import key_layers
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.data.source_reading import has_pairs
from prompt_tuning.evaluation.results import EvaluationResult
from prompt_tuning.losses.context_distillation import ContextDistillation
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.settings.evaluation_settings import Evaluation
from prompt_tuning.tuned.comparison import measure_each, open_comparison
from prompt_tuning.tuned.load_tuned import load_tuned

MEMORY, NOTHING = "memory", "nothing"
FIRST_TOKENS, WHOLE_TEXT = "first tokens", "whole text"
METRICS = {
    "loss": "divergence",
    "cross_entropy": "cross_entropy",
    "exact_match": "exact_match",
    "squad_f1": "f1",
}
"""Names of metrics of an evaluation, and their names here."""

Measured = dict[str, dict[str, float]]
"""Numbers of each of what rows follow, by their names."""


def measure_memory(
    run: Run,
    evaluation: Evaluation,
    *,
    loaded: tuple[PromptedModel, Parameters] | None = None,
) -> Measured:
    """Compares the memory of a run with its text, on the same held-out rows.

    Args:
      run: a run that distilled a text into a key/value prefix.
      evaluation: held-out rows. If they are pairs and it measures no answers, exact
        match and the F1 of words are measured.
      loaded: the run's model and its parameters, if they were loaded before.

    Returns:
      for each of what the rows follow, its `positions`, the `bytes` of their keys and
      values, and the `compression`, the tokens of the text per position; the
      `divergence` from the model that reads the text and the `cross_entropy`, in nats
      per token, and the share of the divergence behind nothing that is `closed`; of
      generated answers the `exact_match` and the `f1` of their words.

    Raises:
      InputError: if the run has no such prefix.
    """
    objective = run.objective
    if isinstance(objective, ContextDistillation) and objective.context_key is not None:
        raise InputError(
            "each example of the run had its own context "
            f"({type(objective).__name__}.context_key), so there is no single text to "
            "compare the memory with: evaluate it without --memory"
        )
    model, parameters = load_tuned(run) if loaded is None else loaded
    prefix = key_value_prefix(parameters)
    if not isinstance(objective, ContextDistillation) or prefix is None:
        raise InputError(
            "the run did not distill a text into a key/value prefix, so it has no "
            "memory to measure: give the directory of a run of prompt-tuning remember"
        )
    if has_pairs(evaluation.data) and not evaluation.generates:
        metrics = [*evaluation.metrics, "squad"]
        evaluation = dataclasses.replace(evaluation, exact_match=True, metrics=metrics)
    text, slots = objective.context, prefix.shape[2]
    tokenizer = model.needed_tokenizer()
    ids, begin = tokenizer.encode(text), model.interface.begin_ids
    first = tokenizer.decode(ids[: max(slots - len(begin), 1)])
    sizes = {MEMORY: slots, NOTHING: 0, FIRST_TOKENS: slots, WHOLE_TEXT: len(ids)}
    if first == text:
        del sizes[FIRST_TOKENS]
    systems = open_comparison(
        run,
        evaluation,
        baseline=True,
        text_prompts=list(dict.fromkeys([first, text])),
        loaded=(model, parameters),
    )
    per_position = _position_bytes(model.config)
    measured = {}
    measurements = measure_each(systems)
    for (name, size), (_, _, result) in zip(sizes.items(), measurements, strict=True):
        measured[name] = {
            "positions": float(size),
            "bytes": float(size * per_position),
            "compression": len(ids) / size if size else 0.0,
            **_values(result),
        }
    nothing = measured[NOTHING]["divergence"]
    for values in measured.values():
        values["closed"] = 1 - (values["divergence"] / nothing if nothing else 0.0)
    return measured


def key_value_prefix(parameters: Parameters) -> Float[Array, "L 2 P G K"] | None:
    """Returns a prefix of keys and values; None without one.

    Soft prompts, `[P, D]`, and deep ones, `[L, P, D]`, have the same path.
    """
    prefix = parameters.get(PREFIX_PATH)
    return prefix if prefix is not None and prefix.ndim == 5 else None


def _position_bytes(config: ModelConfig) -> int:
    """Returns the number of bytes of a position's keys and values in all blocks."""
    of_layer = config.key_value_heads * config.head_width
    numbers = 2 * key_layers(config) * of_layer
    return numbers * np.dtype(config.dtype).itemsize


def _values(result: EvaluationResult) -> dict[str, float]:
    metrics = result.metrics
    return {
        name: float(metrics[metric].value)
        for metric, name in METRICS.items()
        if metric in metrics
    }


def memory_table(measured: Measured, title: str = "held-out rows") -> Table:
    """Tabulates what `measure_memory` returns, the farthest from the text first."""
    shown = [name for name in COLUMNS if name in measured[MEMORY]]
    if "exact_match" in shown:
        shown = [name for name in shown if name not in ("divergence", "cross_entropy")]
    table = Table(title=title)
    table.add_column("behind", no_wrap=True)
    for name in shown:
        table.add_column(COLUMNS[name][0], justify="right")
    for name in sorted(measured, key=lambda name: measured[name]["closed"]):
        values = measured[name]
        table.add_row(name, *(COLUMNS[column][1](values[column]) for column in shown))
    return table


def _kilobytes(size: float) -> str:
    return f"{size / 1000:,.1f} kB" if size else "0"


COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "positions": ("positions", "{:.0f}".format),
    "bytes": ("size", _kilobytes),
    "compression": ("ratio", lambda value: f"{value:.1f}x" if value else "-"),
    "exact_match": ("exact", "{:.1%}".format),
    "f1": ("F1", "{:.1%}".format),
    "divergence": ("KL", "{:.4f}".format),
    "cross_entropy": ("cross entropy", "{:.4f}".format),
    "closed": ("closed", "{:.1%}".format),
}
"""Headings of the columns, and how their values are written."""
