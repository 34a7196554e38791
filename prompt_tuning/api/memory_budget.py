"""Choose the rows and steps of a memory that fit a time budget, by a short probe."""

import dataclasses
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from prompt_tuning.core.atomic_files import replace_file
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.typed_json import read_object
from prompt_tuning.texts.study_files import STUDY_FILE, StudyFiles
from prompt_tuning.texts.text_study import TextStudy

BUDGET_FILE = "budget.json"
EPOCHS = 8
"""Passes over the rows."""
PROBE_ROWS, PROBE_STEPS = 64, 6
RESERVE = 0.1
"""Share of the time reserved for the final comparison."""


@runtime_checkable
class MemoryPlan(Protocol):
    """How to write and learn rows about a text."""

    def write_rows(self, folder: Path, study: TextStudy) -> StudyFiles:
        """Writes the rows of a study into a folder."""
        ...

    def train(self, files: StudyFiles, steps: int, **settings: Any) -> Any:
        """Trains on rows; `settings` are passed on to `tune`."""
        ...


class Fitted(NamedTuple):
    """The numbers of rows to learn from and of optimizer steps that fit a budget."""

    rows: int
    steps: int


def fit_budget(
    folder: Path,
    seconds: float,
    study: TextStudy,
    plan: MemoryPlan,
    batch_size: int,
) -> Fitted:
    """Times a few rows and steps, and returns how many fit a budget.

    The numbers are stored next to the rows, so that a resumed call and memories of
    other sizes from the same rows use the same ones.

    Args:
      folder: folder of the rows.
      seconds: time for everything, this probe included.
      study: settings of the rows.
      plan: writes rows and trains on them.
      batch_size: rows per step.

    Raises:
      InputError: if the budget is too small, or the folder's rows belong to another
        budget.
    """
    file = folder / BUDGET_FILE
    if file.exists():
        known = read_object(file)
        recorded = known.number("seconds")
        if recorded != seconds:
            raise InputError(
                f"{folder} has rows of a budget of {recorded:g} seconds for each "
                f"memory, and this is {seconds:g}: give the same, or another directory"
            )
        return Fitted(known.integer("rows"), known.integer("steps"))
    if (folder / STUDY_FILE).exists():
        raise InputError(
            f"{folder} has rows that no budget chose: give the numbers of rows and "
            "steps that they were made with, or another directory"
        )
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="prompt-tuning-") as probe:
        row, files = _time_rows(Path(probe), study, plan)
        step, compiling = _time_steps(Path(probe), files, plan)
    # The step is compiled again, and other programs for the comparison.
    spent = time.monotonic() - started + 2 * compiling
    left = seconds * (1 - RESERVE) - spent - study.held_out * row
    rows = int(left / (row + EPOCHS * step / batch_size))
    if rows < batch_size:
        needed = spent + study.held_out * row + batch_size * row + EPOCHS * step
        raise InputError(
            f"the budget is {seconds:.0f} seconds, but a memory takes at least "
            f"{needed / (1 - RESERVE):.0f} here ({1000 * row:.0f} ms for a row, "
            f"{1000 * step:.0f} ms for a step): give more time, or fewer rows to "
            "measure on (held_out)"
        )
    fitted = Fitted(rows, max(EPOCHS * rows // batch_size, 1))
    folder.mkdir(parents=True, exist_ok=True)
    content = {"seconds": seconds, **fitted._asdict()}
    replace_file(file, json.dumps(content, indent=1) + "\n")
    return fitted


def _time_rows(
    folder: Path, study: TextStudy, plan: MemoryPlan
) -> tuple[float, StudyFiles]:
    """Returns the seconds per row, without compilation, and the rows."""
    part = dataclasses.replace(study, rows=PROBE_ROWS, held_out=0)
    plan.write_rows(folder / "first", part)
    started = time.monotonic()
    files = plan.write_rows(folder / "second", part)
    return (time.monotonic() - started) / PROBE_ROWS, files


def _time_steps(
    folder: Path, files: StudyFiles, plan: MemoryPlan
) -> tuple[float, float]:
    """Returns the seconds per step and the seconds before the first step."""
    ends: list[float] = []
    started = time.monotonic()
    probe = plan.train(
        files,
        PROBE_STEPS,
        directory=folder / "run",
        callbacks=[lambda step, metrics: ends.append(time.monotonic()) or None],
        log_every=1,
        progress=False,
    )
    if not probe.result.finished:  # a signal stopped it
        raise KeyboardInterrupt
    step = statistics.median(b - a for a, b in itertools.pairwise(ends))
    return step, max(ends[0] - started - step, 0.0)
