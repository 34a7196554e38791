"""How many rows and steps of a memory fit into a time, by a short probe."""

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
"""How often each row is read."""
PROBE_ROWS, PROBE_STEPS = 64, 6
RESERVE = 0.1
"""Share of the time that is left to the comparison at the end."""


@runtime_checkable
class MemoryPlan(Protocol):
    """How rows about a text are written and learned."""

    def write_rows(self, folder: Path, study: TextStudy) -> StudyFiles:
        """Writes the rows of a study into a folder."""
        ...

    def train(self, files: StudyFiles, steps: int, **settings: Any) -> Any:
        """Trains on rows for some steps, with further settings of `tune`."""
        ...


class Fitted(NamedTuple):
    """What fits into a time.

    Attributes:
      rows: number of rows to learn from.
      steps: number of optimizer steps.
    """

    rows: int
    steps: int


def fit_budget(
    folder: Path,
    seconds: float,
    study: TextStudy,
    plan: MemoryPlan,
    batch_size: int,
) -> Fitted:
    """Measures a few rows and steps, and returns how many fit into a time.

    The numbers are stored beside the rows, so that a call that goes on, and memories of
    other sizes from the same rows, have the same ones.

    Args:
      folder: folder of the rows.
      seconds: time for everything, this probe included.
      study: settings of the rows.
      plan: writes rows and trains on them.
      batch_size: number of rows of a step.

    Raises:
      InputError: if the time is too short, or the folder's rows are of another time.
    """
    file = folder / BUDGET_FILE
    if file.exists():
        known = read_object(file)
        before = known.number("seconds")
        if before != seconds:
            raise InputError(
                f"{folder} has rows of a budget of {before:g} seconds for each memory, "
                f"and this is {seconds:g}: give the same, or another directory"
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
    """Returns the seconds of a row once programs are compiled, and the rows."""
    part = dataclasses.replace(study, rows=PROBE_ROWS, held_out=0)
    plan.write_rows(folder / "first", part)
    started = time.monotonic()
    files = plan.write_rows(folder / "second", part)
    return (time.monotonic() - started) / PROBE_ROWS, files


def _time_steps(
    folder: Path, files: StudyFiles, plan: MemoryPlan
) -> tuple[float, float]:
    """Returns the seconds of a step, and those before the first one."""
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
