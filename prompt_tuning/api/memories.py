"""`remember`: train a prefix that replaces a text.

Eyuboglu et al. (2025, "Cartridges", arXiv 2506.06266) train a key/value prefix to stand
for a document. `remember` does so with parts of this package: it writes rows about the
text (`texts.text_study`), starts from attention matching, trains by context
distillation in an ordinary run, and compares the result with the text on held-out rows.
"""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from prompt_tuning.api.memory_budget import fit_budget
from prompt_tuning.api.memory_update import STUDY, OldMemory
from prompt_tuning.api.model import Model
from prompt_tuning.api.tune import TunedModel, load, tune
from prompt_tuning.config.config_values import CONFIG_FILE
from prompt_tuning.config.deferred_factories import Configurable, Configured
from prompt_tuning.config.gin_sources import MAXIMUM_BYTES
from prompt_tuning.core.atomic_files import write_file
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.field_checks import check_value
from prompt_tuning.core.number_ranges import AxisLength, PositiveInteger, PositiveNumber
from prompt_tuning.core.progress_display import noted_bar
from prompt_tuning.data.text.chat_templates import has_chat_template
from prompt_tuning.decoding.row_checks import check_generates
from prompt_tuning.texts import text_study
from prompt_tuning.texts.memory_comparison import measure_memory
from prompt_tuning.texts.memory_tables import memory_tables
from prompt_tuning.texts.study_files import CHUNK_KEY, StudyFiles, write_study
from prompt_tuning.texts.text_study import StudiedTexts, TextStudy

STARTS = {
    "matching": "from_attention_matching",
    "chunks": "from_chunks",
    "first": "from_text",
}
"""Initializers by the value of `start`."""
RATE, ROWS, STEPS = 0.02, 1024, 200
KINDS = (text_study.PASSAGE, text_study.CONTINUATION)
"""Kinds of rows for a model without a chat template."""
SLOTS = 128
RESULTS, PEFT_FOLDER = "memory.json", "peft"
LONGEST = MAXIMUM_BYTES * 2 // 5
"""Maximum size of a text in bytes; a run's config contains it twice, in short lines."""

Start = Literal["matching", "chunks", "first"]


def remember(
    model: Model | str | Path,
    text: str,
    *,
    slots: int | None = None,
    steps: int | None = None,
    batch_size: int = 32,
    start: Start | None = None,
    rows: int | None = None,
    held_out: int = 128,
    budget: float | int | None = None,
    chunk: int | None = None,
    passage: int = 32,
    reasoning: float | int | None = None,
    start_from: str | Path | None = None,
    directory: str | Path | None = None,
    study_directory: str | Path | None = None,
    seed: int = 0,
    progress: bool = True,
) -> TunedModel:
    """Trains a key/value prefix that replaces a text.

    With the prefix in place, the model answers about as it does after reading the text,
    but reads only `slots` positions. It learns from rows that the frozen model writes:
    questions and answers about the text if it has a chat template, otherwise passages
    of the text and continuations of them. The loss is `ContextDistillation`. The
    teacher reads the whole text or, if text and row exceed the model's positions, the
    chunk that the row was written from.

    The directory is an ordinary run directory with two additions: `memory.json`
    compares the memory with the text on held-out rows, and `peft` is a PEFT adapter of
    type CARTRIDGE. An interrupted call resumes when you repeat it.

    Args:
      model: result of `load`, or a checkpoint as `load` takes it; decoder-only.
      text: the text.
      slots: length of the prefix; its first slot stays frozen. None for 128, or for the
        length of the memory in `start_from`.
      steps: number of optimizer steps. None for 200, or, with `budget` or `start_from`,
        for as many as read each row eight times.
      batch_size: rows per step.
      start: initial values: "matching" (`from_attention_matching`, the default),
        "chunks" (`from_chunks`) or "first" (`from_text`).
      rows: number of rows to learn from; None for 1,024, or as many as the budget
        allows.
      held_out: number of rows to measure on.
      budget: seconds for the whole call. A short probe then finds how many rows and
        steps fit. The result depends on the machine; it is stored with the rows, so a
        resumed call uses the same numbers.
      chunk: maximum number of tokens of the text that the model reads before it writes
        a row. None for the whole text or, if that does not fit, half of the model's
        positions.
      passage: maximum number of learned tokens per row.
      reasoning: share of answers that start with reasoning, for chat templates with
        `enable_thinking`; None leaves it to the template.
      start_from: directory of a memory of an earlier version of the text. New rows are
        then only about what changed, and half of the rows to learn from are old ones.
        `update.json` compares both memories on old held-out rows.
      directory: run directory; None for a temporary one.
      study_directory: folder of the rows, e.g. to share them between memories of
        different sizes; None for `study` in the run directory.
      seed: seed of the rows and their order.
      progress: whether to show progress and the comparison.

    Returns:
      the model with the memory.

    Raises:
      InputError: if the text has fewer tokens than the memory has slots, the model does
        not support such a prefix, the directory contains a memory of a different text,
        or the text contains nothing new compared to `start_from`.

    Examples:
      >>> story = "reverse: apple=elppa upper: bread=BREAD tail: chair=hair"
      >>> memory = pt.remember(
      ...     model, story, slots=8, steps=2, rows=16, held_out=8, progress=False
      ... )
      >>> memory.trained["decoder/prompt/prompt"].shape
      (4, 2, 8, 4, 32)
    """
    _check_choices(slots, start, held_out, budget, (rows, steps), start_from)
    base = model if isinstance(model, Model) else load(model)
    old = None if start_from is None else OldMemory.open(Path(start_from), base, slots)
    if old is not None:
        slots, chunk = old.slots, chunk or old.study.chunk
    slots = SLOTS if slots is None else slots
    study = TextStudy(
        rows=ROWS if rows is None else rows,
        held_out=held_out,
        chunk=chunk,
        passage=passage,
        reasoning=reasoning,
        kinds=_kinds(base),
        seed=seed,
    )
    plan = _MemoryPlan.open(base, text, study, slots, start, batch_size, progress)
    if old is not None:
        teacher_text = old.teacher_text(plan.text)
        plan = dataclasses.replace(plan, prefix=old.prefix, text=teacher_text)
    folder = Path(directory or tempfile.mkdtemp(prefix="prompt-tuning-"))
    rows_folder = Path(study_directory or folder / STUDY)
    check_folder(folder, rows_folder)
    settings = {"directory": folder, "progress": progress}
    if old is not None:
        tuned = old.train(plan, rows_folder, text, steps, **settings)
    else:
        study, steps = plan.study, STEPS if steps is None else steps
        if budget is not None:
            fitted = fit_budget(rows_folder, budget, study, plan, batch_size)
            steps, study = fitted.steps, dataclasses.replace(study, rows=fitted.rows)
            if progress:
                print(f"budget: {fitted.rows} rows and {fitted.steps} steps")
        tuned = plan.train(plan.write_rows(rows_folder, study), steps, **settings)
    if directory is None:
        tuned.keep_until_collected(str(folder))
    if tuned.result is None or tuned.result.finished:
        finish_memory(tuned, progress=progress)
    return tuned


def check_folder(folder: Path, rows: Path) -> None:
    """Checks that a directory has no run without the rows of a memory.

    Raises:
      InputError: if it has one.
    """
    if (folder / CONFIG_FILE).exists() and not rows.exists():
        raise InputError(
            f"{folder} has a run that is not a memory of a text: give another directory"
        )


def _check_choices(
    slots: int | None,
    start: Start | None,
    held_out: int,
    budget: float | int | None,
    counts: tuple[int | None, int | None],
    start_from: str | Path | None,
) -> None:
    check_value("slots", slots, AxisLength | None)
    check_value("start", start, Start | None)
    check_value("held_out", held_out, PositiveInteger)
    check_value("budget", budget, PositiveNumber | None)
    if budget is not None and counts != (None, None):
        raise InputError(
            "a budget chooses the numbers of rows and steps: leave out rows and steps, "
            "or the budget"
        )
    if start_from is not None and (budget, start) != (None, None):
        raise InputError(
            "a memory that starts from another one keeps its slots, and learns from "
            "rows about what is new: leave out start and budget, or start_from"
        )


@dataclasses.dataclass(frozen=True)
class _MemoryPlan:
    """How to write and learn rows about a text.

    Attributes:
      model: the frozen model.
      text: the text if the model can read it before a row; else None.
      read: chunks of the text.
      study: settings of the rows.
      prefix: the prefix to train.
      batch_size: rows per step.
      progress: whether to show progress.
    """

    model: Model
    text: str | None
    read: StudiedTexts
    study: TextStudy
    prefix: Configured
    batch_size: int
    progress: bool

    @classmethod
    def open(
        cls,
        model: Model,
        text: str,
        study: TextStudy,
        slots: int,
        start: Start | None,
        batch_size: int,
        progress: bool,
    ) -> "_MemoryPlan":
        """Checks that the model supports the memory before any row is written."""
        _check_size(text)
        fits, limit = check_length(text, model, slots), model.config.maximum_positions
        if not fits and study.chunk is None and limit is not None:
            study = dataclasses.replace(study, chunk=limit // 2)
        chunks = text_study.read_texts({"the text": text}, model.prompted, study)
        prefix = _prefix(text, slots, start or "matching")
        Model.open(model.settings, [prefix], study.seed)
        known = text if fits else None
        return cls(model, known, chunks, study, prefix, batch_size, progress)

    def write_rows(self, folder: Path, study: TextStudy) -> StudyFiles:
        """Writes the rows of a study."""
        total, model = study.rows + study.held_out, self.model
        with noted_bar("writing rows", total, shown=self.progress) as advance:
            return write_study(
                folder, self.read, study, model.prompted, model.parameters, advance
            )

    def train(self, files: StudyFiles, steps: int, **settings: Any) -> TunedModel:
        """Trains on rows; the teacher reads the text if it fits, else a row's chunk."""
        teacher = Configurable("ContextDistillation")
        if self.text is not None:
            teacher = teacher(context=self.text)
        else:
            teacher = teacher(context_key=CHUNK_KEY, contexts=str(files.chunks))
        return tune(
            self.model,
            self.prefix,
            [files.train],
            steps=steps,
            learning_rate=RATE,
            evaluation=files.held_out and [files.held_out],
            objective=teacher,
            batch_size=self.batch_size,
            seed=self.study.seed,
            **settings,
        )


def _check_size(text: str) -> None:
    """Checks that a text fits in the config of a run."""
    size = len(repr(text).encode())
    if size > LONGEST:
        raise InputError(
            f"the text takes {size:,} bytes, expected at most {LONGEST:,}, because the "
            "config of a run holds it: give a shorter text"
        )


def _kinds(model: Model) -> tuple[str, ...] | None:
    """Returns the kinds of rows to write; None for conversations."""
    return None if has_chat_template(model.prompted.needed_tokenizer()) else KINDS


def check_length(text: str, model: Model, slots: int) -> bool:
    """Checks that the model is a decoder and the text longer than the prefix.

    Returns:
      whether the model can read the text before a row.

    Raises:
      InputError: if the text is shorter than the prefix, or the model generates no
        text.
    """
    check_generates(model.prompted)
    begin = len(model.prompted.interface.begin_ids)
    length = len(model.prompted.needed_tokenizer().encode(text))
    if length + begin < slots:
        raise InputError(
            f"the text has {length} tokens, expected at least {slots - begin} for a "
            f"memory of {slots} slots: give a longer text, or no more slots than it "
            "has tokens"
        )
    limit = model.config.maximum_positions
    return (
        limit is None
        or begin + length + text_study.GIVEN + text_study.SHORTEST <= limit
    )


def _prefix(text: str, slots: int, start: Start) -> Configured:
    initializer = Configurable(STARTS[start])(text=text)
    return Configurable("KeyValuePrefix")(
        length=slots, initializer=initializer, frozen_slots=int(slots > 1)
    )


def finish_memory(tuned: TunedModel, *, progress: bool) -> None:
    """Measures a memory and writes `memory.json` and the PEFT folder."""
    folder = Path(tuned.run.directory)
    assert tuned.run.evaluation is not None
    loaded = tuned.prompted, tuned.parameters
    measured = measure_memory(tuned.run, tuned.run.evaluation, loaded=loaded)
    content = json.dumps(measured, indent=2) + "\n"
    write_file(folder / RESULTS, content.encode(), force=True)
    tuned.to_peft(folder / PEFT_FOLDER, force=True)
    if progress:
        Console().print(*memory_tables(measured))
