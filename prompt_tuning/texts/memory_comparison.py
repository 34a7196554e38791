"""Compare a memory of a text with the text itself.

The prefix of a `remember` run is measured against no context, against as many tokens of
the text (the first ones, a summary, or those retrieved for each row), and against the
whole text. If the text is longer than the model's positions, each row's chunk takes its
place.
"""

import dataclasses
import functools
import json
import tempfile
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from prompt_tuning.adapters.adapter import PREFIX_PATH
from prompt_tuning.adapters.prompt_files import from_int8, to_int8
from prompt_tuning.config.run import Run
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.layer_kinds import key_layers
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.data.examples.context_column import IDS, TEXT
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.data.rows.text_records import read_records
from prompt_tuning.data.rows.token_columns import CONTEXTS
from prompt_tuning.data.source_reading import has_pairs
from prompt_tuning.data.text.chat_templates import has_chat_template
from prompt_tuning.data.text.tokenizers import Tokenizer
from prompt_tuning.evaluation.evaluator import Evaluator
from prompt_tuning.evaluation.results import EvaluationResult
from prompt_tuning.evaluation.token_outcomes import CROSS_ENTROPY, LOSS
from prompt_tuning.losses.context_distillation import ContextDistillation, Distillation
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.settings.data_source import DataSource
from prompt_tuning.settings.evaluation_settings import Evaluation
from prompt_tuning.texts.study_rows import StudyWriter
from prompt_tuning.texts.text_study import TextRetriever, TextStudy, read_texts
from prompt_tuning.training.distillation import make_reference
from prompt_tuning.training.objective_data import context_column
from prompt_tuning.tuned.comparison import ChooseTexts, open_comparison, open_frozen
from prompt_tuning.tuned.load_tuned import load_tuned

MEMORY, NOTHING = "memory", "nothing"
FIRST_TOKENS, RETRIEVED, SUMMARY = "first tokens", "retrieved", "summary"
WHOLE_TEXT, OWN_CHUNK = "whole text", "its chunk"
ORDER = (NOTHING, FIRST_TOKENS, SUMMARY, RETRIEVED, MEMORY, OWN_CHUNK, WHOLE_TEXT)
PARTS = 4
"""Number of parts of the text that divergence is reported for."""
PART_NAMES = tuple(f"part_{part + 1}" for part in range(PARTS))
METRICS = {
    LOSS: "divergence",
    CROSS_ENTROPY: "cross_entropy",
    "exact_match": "exact_match",
    "squad_f1": "f1",
}
"""Names of an evaluation's metrics, and their names here."""

UNRELATED = (
    "The kettle began to sing, and she put two cups on the table by the window. ",
    "Trains to the coast leave from platform four every hour until ten at night. ",
    "Sort the list, then walk through it once and drop each item seen before. ",
    "After the rain the river was brown and fast, and the lower path was closed. ",
)
"""Texts that no document is about."""

INT8 = "divergence_int8"

Measured = dict[str, dict[str, float]]
"""Metrics of each context that rows are read in, by name."""


def measure_memory(
    run: Run,
    evaluation: Evaluation,
    *,
    loaded: tuple[PromptedModel, Parameters] | None = None,
) -> Measured:
    """Compares the memory of a run with its text, on the same held-out rows.

    Args:
      run: a run that distilled a text into a key/value prefix.
      evaluation: held-out rows. If they are pairs and no metric of answers is set,
        exact match and the F1 of words are measured.
      loaded: the run's model and its parameters, if already loaded.

    Returns:
      for each context, by name: `positions`, `bytes` (of its keys and values) and
      `compression` (tokens of the text per position); `divergence` (from the model that
      reads the text, or the row's chunk of it) and `cross_entropy`, in nats per token;
      `closed`, the share of the no-context divergence that is gone; `part_1` to
      `part_4`, the divergence of rows whose learned tokens are in each quarter of the
      text; and for generated answers `exact_match`, `f1` (of words) and `speed` (tokens
      per second). Retrieved texts have neither `divergence` nor `cross_entropy`. The
      memory also has `drift` (see `memory_drift`) and, unless answers are generated,
      `divergence_int8`, its divergence as stored by `save` in int8.

    Raises:
      InputError: if the run has no such prefix or text.
    """
    objective = run.objective
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
    behind = _what_precedes(run, objective, model, parameters, prefix.shape[2])
    systems = open_comparison(
        run,
        evaluation,
        baseline=True,
        text_prompts=list(behind.texts.values()),
        own_texts=behind.own_texts,
        loaded=(model, parameters),
    )
    per_position = _position_bytes(model.config)
    measured, parts = {}, None
    for name in (MEMORY, NOTHING, *behind.texts, *behind.own_texts):
        system = systems.pop(0)  # its parameters are released with it
        evaluator, own = system.evaluator, system.read()
        result, size = evaluator.measure(own), behind.sizes[name]
        if parts is None:
            parts = _parts(np.array(behind.whole), evaluator.examples)
        measured[name] = {
            "positions": float(size),
            "bytes": float(size * per_position),
            "compression": len(behind.whole) / size if size else 0.0,
            **_values(result),
            **_divergence_of_parts(result, parts),
        }
        if name == MEMORY and not evaluation.generates:
            measured[name][INT8] = _divergence_in_int8(evaluator, own)
        if evaluation.generates:
            if not evaluation.text_metrics:  # not all answers were generated
                evaluator.generate(own)
            measured[name]["speed"] = _answering_speed(evaluator, own)
        del system, evaluator, own
    drift = memory_drift(model, parameters)
    if drift is not None:
        measured[MEMORY]["drift"] = drift
    if OWN_CHUNK in measured:
        measured[OWN_CHUNK]["divergence"] = 0.0  # it is the teacher itself
    nothing = measured[NOTHING]["divergence"]
    for values in measured.values():
        if "divergence" in values:
            values["closed"] = 1 - (values["divergence"] / nothing if nothing else 0.0)
    return {name: measured[name] for name in ORDER if name in measured}


def _divergence_in_int8(evaluator: Evaluator, parameters: Parameters) -> float:
    prefix = np.asarray(parameters[PREFIX_PATH])
    rounded = jnp.asarray(from_int8(to_int8(prefix), MEMORY))
    result = evaluator.measure(parameters | {PREFIX_PATH: rounded})
    return float(result.metrics[LOSS].value)


def _answering_speed(evaluator: Evaluator, parameters: Parameters) -> float:
    """Measures the tokens per second of answers, without compilation."""
    started = time.perf_counter()
    tokens = sum(map(len, evaluator.generate(parameters)))
    return tokens / (time.perf_counter() - started)


@dataclasses.dataclass(frozen=True)
class _Preceding:
    """The contexts that rows are read in.

    `texts` are the same for all rows, `own_texts` differ by row; `sizes` counts the
    positions of each. `whole` has the token ids of the text.
    """

    whole: list[int]
    sizes: dict[str, int]
    texts: dict[str, str]
    own_texts: dict[str, ChooseTexts]


def _what_precedes(
    run: Run,
    objective: ContextDistillation,
    model: PromptedModel,
    parameters: Parameters,
    slots: int,
) -> _Preceding:
    tokenizer, column = model.needed_tokenizer(), context_column(objective)
    chunks = [] if column is None else column.encode(tokenizer)
    text = document(objective, tokenizer)
    whole, count = tokenizer.encode(text), slots - len(model.interface.begin_ids)
    count, sizes = max(count, 1), {MEMORY: slots, NOTHING: 0}
    texts: dict[str, str] = {}
    own_texts: dict[str, ChooseTexts] = {}
    if count < len(whole):
        texts[FIRST_TOKENS] = tokenizer.decode(whole[:count])
        summary = _summarize(run, text, parameters, count)
        if summary:
            texts[SUMMARY] = summary
        retriever = TextRetriever(text, tokenizer, count)
        own_texts[RETRIEVED] = functools.partial(_retrieved, retriever)
        sizes |= dict.fromkeys((FIRST_TOKENS, SUMMARY, RETRIEVED), slots)
    if column is None:
        texts[WHOLE_TEXT], sizes[WHOLE_TEXT] = text, len(whole)
    else:
        own_texts[OWN_CHUNK] = functools.partial(_own_chunks, chunks)
        sizes[OWN_CHUNK] = round(sum(map(len, chunks)) / len(chunks))
    return _Preceding(list(whole), sizes, texts, own_texts)


def document(objective: ContextDistillation, tokenizer: Tokenizer) -> str:
    """Returns the text that a teacher reads, whole or in chunks.

    The text of a chunk is preferred to its ids, which may include a chat template.

    Raises:
      InputError: if each row has its own text.
    """
    contexts = objective.contexts
    if not objective.context and not contexts:
        raise InputError(
            "the run distilled texts that are in its rows (context_key), so there is "
            "no document to compare the memory with: evaluate it without --memory"
        )
    if not isinstance(contexts, str):
        return objective.context or "".join(contexts or ())
    records = [record.content for record in read_records(Path(contexts))]
    return "".join(x.get(TEXT) or tokenizer.decode(x[IDS]) for x in records)


def _summarize(run: Run, text: str, parameters: Parameters, count: int) -> str | None:
    """Lets the frozen model summarize a text; None if it has no chat template."""
    model = open_frozen(run)
    tokenizer = model.needed_tokenizer()
    if not has_chat_template(tokenizer):
        return None
    limit, length = model.config.maximum_positions, len(tokenizer.encode(text))
    chunk = None if limit is None or 2 * length < limit else limit // 2
    study = TextStudy(chunk=chunk, answer=count)
    chunks = read_texts({"the text": text}, model, study)
    in_memory = model.read_parameters(parameters)
    written = StudyWriter(chunks, study, model, in_memory).summaries(count)
    return tokenizer.decode([token for part in written for token in part])


def _parts(
    text: Integer[np.ndarray, "T"], examples: Examples
) -> Integer[np.ndarray, "E"]:
    """Returns the part of a text that each example's middle learned token is from.

    Tokens that occur more than once count as the first such part; tokens that the text
    lacks give part -1.
    """
    parts = np.full(len(examples), -1)
    for number in range(len(examples)):
        example = examples[number]
        learned = example.targets[example.weights != 0]
        for tokens in (learned, learned[:-1]):  # with and without the end of a row
            if not 0 < len(tokens) <= len(text):
                continue
            windows = np.lib.stride_tricks.sliding_window_view(text, len(tokens))
            places = np.flatnonzero((windows == tokens).all(axis=1))
            if len(places):
                middle = places[0] + len(tokens) // 2
                parts[number] = PARTS * middle // len(text)
                break
    return parts


def _divergence_of_parts(
    result: EvaluationResult, parts: Integer[np.ndarray, "E"]
) -> dict[str, float]:
    """Returns the mean divergence of the examples from each part of the text."""
    tokens, values = result.tokens, {}
    if tokens is None or tokens.objective is None:
        return {}
    for part in range(PARTS):
        weight = tokens.weight * (parts[tokens.example] == part)
        if weight.sum():
            mean = float((weight * tokens.objective).sum() / weight.sum())
            values[PART_NAMES[part]] = mean
    return values


def memory_drift(model: PromptedModel, parameters: Parameters) -> float | None:
    """Measures how much a memory changes predictions in unrelated text.

    Returns:
      the divergence of the model with the memory from the frozen model alone, in nats
      per token of English text; None if the tokenizer does not know its characters.
    """
    try:
        for text in UNRELATED:
            model.needed_tokenizer().encode(text)
    except InputError:
        return None
    with tempfile.TemporaryDirectory(prefix="prompt-tuning-") as folder:
        file = Path(folder) / "unrelated.jsonl"
        lines = (json.dumps({"prompt": "", "completion": x}) for x in UNRELATED)
        file.write_text("\n".join(lines))
        evaluation = Evaluation(data=DataSource(files=[str(file)], add_eos=False))
        teacher = Distillation(make_reference(model.config))
        evaluator = Evaluator(model, evaluation, objective=teacher)
        return evaluator(parameters)[LOSS]


def _own_chunks(chunks: list[list[int]], examples: Examples) -> list[list[int]]:
    """Returns the chunk that the teacher reads before each example."""
    numbers = (examples[n].columns[CONTEXTS][0] for n in range(len(examples)))
    return [chunks[int(number)] for number in numbers]


def _retrieved(retrieve: TextRetriever, examples: Examples) -> list[list[int]]:
    """Retrieves text for the input of each example."""
    rows = (examples[number] for number in range(len(examples)))
    return [retrieve(row.inputs[: row.prefix_length].tolist()) for row in rows]


def key_value_prefix(parameters: Parameters) -> Float[Array, "L 2 P G K"] | None:
    """Returns a key/value prefix; None if there is none.

    Soft prompts, `[P, D]`, and deep ones, `[L, P, D]`, have the same path.
    """
    prefix = parameters.get(PREFIX_PATH)
    return prefix if prefix is not None and prefix.ndim == 5 else None


def _position_bytes(config: ModelConfig) -> int:
    of_layer = config.key_value_heads * config.head_width
    numbers = 2 * key_layers(config) * of_layer
    return numbers * np.dtype(config.dtype).itemsize


def _values(result: EvaluationResult) -> dict[str, float]:
    metrics = dict(result.metrics)
    if CROSS_ENTROPY not in metrics:  # measured without the objective
        metrics[CROSS_ENTROPY] = metrics.pop(LOSS)
    return {
        name: float(metrics[metric].value)
        for metric, name in METRICS.items()
        if metric in metrics
    }
