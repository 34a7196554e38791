"""A run's own checkpoints: written so that a kill at any moment leaves a good one.

A checkpoint is written under another name, synced, and renamed into place (`renaming`).
What is large is written in the background (`save_sharded`), and takes its name when all
processes have written their parts.
"""

import concurrent.futures
import contextlib
import functools
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prompt_tuning import processes
from prompt_tuning.checkpoints.run_store import checkpoint_files
from prompt_tuning.checkpoints.run_store.atomic_rename import delete, mend, put_in_place
from prompt_tuning.checkpoints.run_store.checkpoint_files import AUTO, FORMS, Writing
from prompt_tuning.checkpoints.run_store.orbax_arrays import Leaf
from prompt_tuning.core.errors import InputError, StorageError
from prompt_tuning.core.fsync import sync_path

FOLDER = "numpy_checkpoints"
# A metric and "min" or "max"; checked here, since it comes from a config file.
KeepBest = tuple[str, str]
OnDamage = Callable[[str], None]
Check = Callable[[Path], dict[str, Any]]

_logger = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one run directory, for the process that trains there.

    Opening it mends what a killed process left: unfinished writes are deleted, and a
    checkpoint that was put aside for a successor that never came is put back. A process
    that trains beside the one that writes opens it read-only.

    Attributes:
      folder: `{run_directory}/numpy_checkpoints`, made by the first save.
      keep_last: how many of the newest are kept.
      keep_best: metric, and whether less or more of it is better; the best checkpoint
        by it is kept too.
      form: of what is saved; see `Run.checkpoint_form`.
    """

    def __init__(
        self,
        run_directory: Path | str,
        keep_last: int = 3,
        keep_best: KeepBest | None = None,
        *,
        form: str = AUTO,
        read_only: bool = False,
    ):
        if form not in FORMS:
            raise InputError(
                f"the form of checkpoints is {form!r}, expected one of {FORMS}"
            )
        if keep_last < 1:
            raise InputError(f"keep_last is {keep_last}, expected at least 1")
        if keep_best is not None and keep_best[1] not in ("min", "max"):
            raise InputError(
                f"keep_best is {keep_best}, expected a metric and 'min' or 'max'"
            )
        self.folder = Path(run_directory) / FOLDER
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.form = form
        self._writes = not read_only
        self._under_way: concurrent.futures.Future[None] | None = None
        if self._writes:
            mend(self.folder)

    def save(
        self,
        step: int,
        trained: Mapping[str, Any],
        optimizer_state: Any,
        extra: Mapping[str, Any],
        *,
        metrics: Mapping[str, float] | None = None,
    ) -> Path:
        """Writes a checkpoint of NumPy's files and deletes those that need not be kept.

        Args:
          step: a checkpoint of the same step is replaced.
          trained: float32 arrays by slash-joined path.
          optimizer_state: any tree of arrays.
          extra: JSON to hand back on loading: key data, example counter.
          metrics: measured at this step; `keep_best` chooses by one of them.

        Raises:
          InputError: if something cannot be stored (see `check_storable`).
          StorageError: if the disk does not take it.
        """
        self.wait()
        checkpoint_files.check_storable(trained, optimizer_state)
        state = self._state(step, metrics, extra)
        with self._told(step):
            temporary = self._begin(step)
            checkpoint_files.write_files(temporary, trained, optimizer_state, state)
            return self._complete(temporary, step)

    def is_sharded(self, trained: Mapping[str, Any], optimizer_state: Any) -> bool:
        """Whether such leaves, or shapes of them, are for `save_sharded`."""
        return checkpoint_files.is_sharded(self.form, trained, optimizer_state)

    def save_sharded(
        self,
        step: int,
        trained: Mapping[str, Any],
        optimizer_state: Any,
        extra: Mapping[str, Any],
        *,
        shapes: tuple[Mapping[str, Any], Any],
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Starts to write a checkpoint in orbax's form; all processes do so together.

        It returns when the arrays are copied to the host and may be donated. The save
        before it has ended then, and what failed in that is raised.

        Args:
          step: a checkpoint of the same step is replaced.
          trained: where they lie, with what pads them there.
          optimizer_state: where it lies.
          extra: JSON to hand back on loading.
          shapes: of both, without padding.
          metrics: measured at this step.

        Raises:
          InputError: if something cannot be stored.
          StorageError: if the disk does not take it, or did not take the one before.
        """
        self.wait()
        checkpoint_files.check_storable(*shapes)
        with self._told(step):
            name = processes.run_on_first(lambda: self._begin(step).name)
            temporary = self.folder / name
            leaves = (trained, optimizer_state)
            writing = checkpoint_files.start_sharded(temporary, *leaves)
        # Nothing that goes on in the background holds an array of the devices.
        state = self._state(step, metrics, extra) | checkpoint_files.described(*shapes)
        background = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._under_way = background.submit(self._finish, writing, temporary, state)
        background.shutdown(wait=False)

    def _finish(self, writing: Writing, temporary: Path, state: dict[str, Any]) -> None:
        """Puts a checkpoint in its place once all processes have written it."""
        with self._told(state["step"]):
            writing.wait()
            if self._writes:
                checkpoint_files.seal_sharded(temporary, state)
                self._complete(temporary, state["step"])

    @contextlib.contextmanager
    def _told(self, step: int) -> Iterator[None]:
        """Says of a checkpoint that it could not be written.

        Raises:
          StorageError: with what the system said.
        """
        try:
            yield
        except OSError as problem:
            steps = [known for known in self.steps() if known != step]
            kept = f"that of step {steps[-1]} is kept" if steps else "there is none yet"
            raise StorageError(
                f"checkpoint_{step} could not be written to {self.folder}: {problem}; "
                f"{kept}. Free some space, or see who may write there, and start the "
                "same command again"
            ) from problem

    def wait(self) -> None:
        """Waits for the save that is under way; what failed in it is raised here."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def close(self) -> None:
        """Waits for the last save, for `contextlib.closing`."""
        self.wait()

    def steps(self) -> list[int]:
        """The steps of all checkpoints, damaged ones too, in rising order."""
        return steps_in(self.folder)

    def latest_valid(self, on_damage: OnDamage = _logger.warning) -> int | None:
        """The newest step whose files are whole; None if there is no checkpoint.

        See `latest_valid_step`.
        """
        return latest_valid_step(self.folder, on_damage)

    def best(self, on_damage: OnDamage = _logger.warning) -> int | None:
        """The step with the best `keep_best` metric; None if none has the metric.

        See `best_step`.
        """
        return best_step(self.folder, self.keep_best, on_damage)

    def load(
        self,
        step: int,
        optimizer_template: Any,
        *,
        trained_template: Mapping[str, Any] | None = None,
    ) -> tuple[dict[str, Leaf], Any, dict[str, Any]]:
        """Verifies a checkpoint and reads it.

        Args:
          step: one that `latest_valid` or `best` has passed.
          optimizer_template: a tree of arrays or `jax.ShapeDtypeStruct`s.
          trained_template: what the run trains, by path; None leaves it unchecked.

        Returns:
          Trained leaves by path, the optimiser state in a tree like the template, and
          the `extra` that was saved. The leaves are NumPy arrays, and in orbax's form
          `StoredArray`s, which are read where they are put.

        Raises:
          InputError: if the checkpoint is missing or damaged, or a leaf's name, shape
            or dtype is not that of the template.
        """
        directory = self.folder / f"checkpoint_{step}"
        state = checkpoint_files.verify_own(directory)
        trained = checkpoint_files.open_trained(directory, state)
        if trained_template is not None:
            checkpoint_files.check_leaves(str(directory), trained, trained_template)
        optimizer = checkpoint_files.read_optimizer(directory, optimizer_template)
        return trained, optimizer, state["extra"]

    def _begin(self, step: int) -> Path:
        """An empty directory for a checkpoint; nothing else is being written."""
        self._make_folder()
        mend(self.folder)
        temporary = self.folder / f"checkpoint_{step}.tmp-{os.getpid()}"
        temporary.mkdir()
        return temporary

    def _state(
        self,
        step: int,
        metrics: Mapping[str, float] | None,
        extra: Mapping[str, Any],
    ) -> dict[str, Any]:
        return {
            "step": step,
            "metrics": {name: float(x) for name, x in (metrics or {}).items()},
            "keep_best": self.keep_best,
            "extra": dict(extra),
        }

    def _complete(self, temporary: Path, step: int) -> Path:
        """Gives a written directory its name; deletes what need not be kept now."""
        final = self.folder / f"checkpoint_{step}"
        sync_path(temporary)
        put_in_place(temporary, final)
        self._prune(step)
        return final

    def _make_folder(self) -> None:
        """Makes the folder and brings its name, and the run's, to the disk."""
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True)
            sync_path(self.folder.parent)
            sync_path(self.folder.parent.parent)

    def _prune(self, saved: int) -> None:
        """Deletes all but the newest, the best, and the one just saved.

        Steps above the one just saved are left alone and do not count: they are what a
        damaged newest checkpoint left, and the one just saved may be the only good one.
        """
        older = [step for step in self.steps() if step <= saved]
        kept = {*older[-self.keep_last :]}
        trusting = checkpoint_files.read_state
        best = best_step(self.folder, self.keep_best, lambda _: None, trusting)
        for step in older:
            if step not in kept and step != best:
                delete(self.folder / f"checkpoint_{step}")


def steps_in(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, in rising order."""
    if not folder.is_dir():
        return []
    found = (re.fullmatch(r"checkpoint_(\d+)", path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


def holds_checkpoints(run_directory: Path | str) -> bool:
    """Whether a run has been here before and would go on, if only to be refused."""
    folder = Path(run_directory) / FOLDER
    return bool(steps_in(folder)) or any(folder.glob("checkpoint_*.old"))


def latest_valid_step(
    folder: Path, on_damage: OnDamage, check: Check = checkpoint_files.verify
) -> int | None:
    """The newest step whose files are all as they were written.

    Args:
      folder: a run's `numpy_checkpoints`; nothing in it is changed.
      on_damage: called with a message for each damaged checkpoint that is passed over.
      check: reads a checkpoint's state, and refuses a damaged one.

    Returns:
      The step, or None if the folder has no checkpoint.

    Raises:
      InputError: if there are checkpoints and all are damaged.
    """
    steps = steps_in(folder)
    for step, _ in _intact(folder, steps[::-1], on_damage, check):
        return step
    if steps:
        raise InputError(
            f"all checkpoints in {folder} are damaged (steps {steps}): put a copy in "
            "their place, or remove them to start again from step 0"
        )
    return None


def best_step(
    folder: Path,
    keep_best: KeepBest | None,
    on_damage: OnDamage,
    check: Check = checkpoint_files.verify,
) -> int | None:
    """The step with the best metric, the earliest of equals.

    Args:
      folder: a run's `numpy_checkpoints`; nothing in it is changed.
      keep_best: metric and direction; None finds no best.
      on_damage: called with a message for each damaged checkpoint that is passed over.
      check: reads a checkpoint's state, and refuses a damaged one; `read_state` trusts
        the files that it lists instead of reading them.

    Returns:
      The step, or None if no intact checkpoint has the metric.
    """
    if keep_best is None:
        return None
    metric, direction = keep_best
    sign = 1 if direction == "min" else -1
    scored = [
        (sign * state["metrics"][metric], step)
        for step, state in _intact(folder, steps_in(folder), on_damage, check)
        if metric in state["metrics"]
    ]
    return min(scored)[1] if scored else None


def best_or_latest(folder: Path, on_damage: OnDamage = _logger.warning) -> Path:
    """The checkpoint to use of a run: its best if it measured one, else its newest.

    Args:
      folder: a run's `numpy_checkpoints`; nothing in it is changed.
      on_damage: called with a message for each damaged checkpoint that is passed over.

    Raises:
      InputError: if there is no checkpoint, or all are damaged.
    """
    reported = set()

    def report_once(message: str) -> None:
        if message not in reported:
            reported.add(message)
            on_damage(message)

    # Gigabytes, where the whole model was trained: none is read twice.
    verify = functools.cache(checkpoint_files.verify)
    latest = latest_valid_step(folder, report_once, verify)
    if latest is None:
        raise InputError(f"{folder} holds no checkpoint; train the run first")
    state = verify(folder / f"checkpoint_{latest}")
    keep_best = state["keep_best"] and tuple(state["keep_best"])
    best = best_step(folder, keep_best, report_once, verify)
    return folder / f"checkpoint_{latest if best is None else best}"


def _intact(
    folder: Path,
    steps: list[int],
    on_damage: OnDamage,
    check: Check,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Step and state of each checkpoint that passes the check; the others reported."""
    for step in steps:
        try:
            state = check(folder / f"checkpoint_{step}")
        except InputError as error:
            on_damage(f"{error}; checkpoint_{step} is passed over")
        else:
            yield step, state
