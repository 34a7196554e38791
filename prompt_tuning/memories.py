"""A text becomes a prefix: `remember`.

Eyuboglu et al. (2025, "Cartridges", arXiv 2506.06266) train a key/value prefix to stand
for a document. Here the parts of this package do it: rows about the text
(`texts.text_study`), a start by attention matching, context distillation in an ordinary
run, and a comparison on rows that were held out.
"""

import json
import tempfile
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from prompt_tuning.api import TunedModel, load, tune
from prompt_tuning.config.deferred_factories import Configurable, Configured
from prompt_tuning.config.gin_sources import MAXIMUM_BYTES
from prompt_tuning.core.atomic_files import write_file
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.field_checks import check_value
from prompt_tuning.core.number_ranges import AxisLength
from prompt_tuning.evaluation.metric_sums import MetricSums
from prompt_tuning.model import Model
from prompt_tuning.texts.text_study import (
    StudiedText,
    TextStudy,
    read_text,
    write_study,
)
from prompt_tuning.tuned.comparison import measure_each, open_comparison

STARTS = {
    "matching": "from_attention_matching",
    "chunks": "from_chunks",
    "first": "from_text",
}
"""The initializer of each way to start."""
RATE = 0.02
RESULTS, PEFT_FOLDER = "memory.json", "peft"
LONGEST = MAXIMUM_BYTES * 2 // 5
"""Maximum size of a text in bytes: the run's config has it twice, in short lines."""

Start = Literal["matching", "chunks", "first"]


def remember(
    model: Model | str | Path,
    text: str,
    *,
    slots: int = 128,
    steps: int = 200,
    batch_size: int = 32,
    start: Start = "matching",
    rows: int = 1024,
    held_out: int = 128,
    chunk: int | None = None,
    passage: int = 32,
    directory: str | Path | None = None,
    seed: int = 0,
    progress: bool = True,
) -> TunedModel:
    """Trains a key/value prefix that stands for a text.

    The model answers behind the prefix about as it does after the text, for the cost of
    `slots` positions. The rows to learn from are passages of the text, and what the
    frozen model writes behind it; the loss is `ContextDistillation`. The directory is
    that of an ordinary run. It also gets `memory.json`, which compares the memory with
    the text itself on held-out rows, and a PEFT folder of type CARTRIDGE. If the call
    is interrupted, the same call goes on.

    Args:
      model: result of `load`, or what `load` takes; a decoder-only model.
      text: the text, which has to fit the model together with a row.
      slots: number of slots of the prefix, of which the first is frozen.
      steps: number of optimizer steps.
      batch_size: number of rows of a step.
      start: "matching" (`from_attention_matching`), "chunks" (`from_chunks`) or "first"
        (`from_text`).
      rows: number of rows to learn from.
      held_out: number of rows to measure on.
      chunk: maximum number of tokens of the text that the model reads before it writes
        a row; None for the whole text.
      passage: maximum number of learned tokens of a row.
      directory: run directory; None for a temporary one.
      seed: seed of the rows and of their order.
      progress: whether to show the progress and the comparison.

    Returns:
      the model with the memory.

    Raises:
      InputError: if the text is shorter than the memory, or too long for the model, the
        model cannot have such a prefix, or the directory has another text's memory.

    Examples:
      >>> story = "reverse: apple=elppa upper: bread=BREAD tail: chair=hair"
      >>> memory = pt.remember(
      ...     model, story, slots=8, steps=2, rows=16, held_out=8, progress=False
      ... )
      >>> memory.trained["decoder/prompt/prompt"].shape
      (4, 2, 8, 4, 32)
    """
    check_value("slots", slots, AxisLength)
    check_value("start", start, Start)
    size = len(repr(text).encode())
    if size > LONGEST:
        raise InputError(
            f"the text takes {size:,} bytes, expected at most {LONGEST:,}, because the "
            "config of a run holds it: give a shorter text"
        )
    study = TextStudy(
        rows=rows, held_out=held_out, chunk=chunk, passage=passage, seed=seed
    )
    base = model if isinstance(model, Model) else load(model)
    read = read_text(text, base.prompted, slots, study)
    prefix = _prefix(text, slots, start)
    # Refuses a model that cannot have the prefix before it writes any rows.
    Model.open(base.settings, [prefix], seed)
    temporary = directory is None
    folder = Path(directory or tempfile.mkdtemp(prefix="prompt-tuning-"))
    files = write_study(folder / "study", read, study, base.prompted, base.parameters)
    tuned = tune(
        base,
        prefix,
        [files[0]],
        steps=steps,
        learning_rate=RATE,
        objective=Configurable("ContextDistillation")(context=text),
        evaluation=[files[1]],
        directory=folder,
        batch_size=batch_size,
        seed=seed,
        progress=progress,
    )
    if temporary:
        tuned.keep_until_collected(str(folder))
    if tuned.result is None or tuned.result.finished:
        _finish(tuned, text, read, slots, progress=progress)
    return tuned


def _prefix(text: str, slots: int, start: Start) -> Configured:
    initializer = Configurable(STARTS[start])(text=text)
    return Configurable("KeyValuePrefix")(
        length=slots, initializer=initializer, frozen_slots=int(slots > 1)
    )


def _finish(
    tuned: TunedModel, text: str, read: StudiedText, slots: int, *, progress: bool
) -> None:
    """Measures a memory, and writes the results and the PEFT folder."""
    folder = Path(tuned.run.directory)
    measured = _measure(tuned, text, read, slots)
    content = json.dumps(measured, indent=2) + "\n"
    write_file(folder / RESULTS, content.encode(), force=True)
    tuned.to_peft(folder / PEFT_FOLDER, force=True)
    if progress:
        _show(measured)


def _measure(
    tuned: TunedModel, text: str, read: StudiedText, slots: int
) -> dict[str, dict[str, float]]:
    """Compares a memory with the text itself, on the run's held-out rows.

    Returns:
      for each of what the rows follow: its positions, the `divergence` from the model
        that reads the text and the `cross_entropy`, in nats per token, and the share
        of the divergence behind nothing that is `closed`.
    """
    assert tuned.run.evaluation is not None
    first = tuned.prompted.needed_tokenizer().decode(
        read.ids[: max(slots - len(read.begin), 1)]
    )
    systems = open_comparison(
        tuned.run,
        tuned.run.evaluation,
        baseline=True,
        text_prompts=[first, text] if first != text else [text],
        loaded=(tuned.prompted, tuned.parameters),
    )
    names = ["memory", "nothing", "first tokens", "whole text"]
    sizes = [slots, 0, min(slots, len(read.ids)), len(read.ids)]
    if first == text:
        names, sizes = [*names[:2], names[3]], [*sizes[:2], sizes[3]]
    results = {
        name: _values(result.metrics) | {"positions": float(size)}
        for name, size, (_, _, result) in zip(
            names, sizes, measure_each(systems), strict=True
        )
    }
    nothing = results["nothing"]["divergence"]
    for values in results.values():
        left = values["divergence"] / nothing if nothing else 0.0
        values["closed"] = 1 - left
    return results


def _values(metrics: Any) -> dict[str, float]:
    sums: dict[str, MetricSums] = dict(metrics)
    return {
        "divergence": float(sums["loss"].value),
        "cross_entropy": float(sums["cross_entropy"].value),
    }


def _show(measured: dict[str, dict[str, float]]) -> None:
    table = Table(title="held-out rows, nats per token")
    for heading in ("behind", "positions", "divergence", "cross-entropy", "closed"):
        table.add_column(heading, justify="left" if heading == "behind" else "right")
    for name in sorted(measured, key=lambda name: measured[name]["closed"]):
        values = measured[name]
        table.add_row(
            name,
            f"{values['positions']:.0f}",
            f"{values['divergence']:.4f}",
            f"{values['cross_entropy']:.4f}",
            f"{values['closed']:.1%}",
        )
    Console().print(table)
