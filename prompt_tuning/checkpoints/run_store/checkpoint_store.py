"""Saves and loads the checkpoints of a run, safe against a kill at any moment.

A checkpoint is written under a temporary name, synced, and renamed (see
`checkpoint_names`). Large checkpoints are written in the background (`save_sharded`)
and renamed once all processes have written their shards.
"""

import concurrent.futures
import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prompt_tuning import processes
from prompt_tuning.checkpoints.run_store import checkpoint_files, checkpoint_names
from prompt_tuning.checkpoints.run_store.checkpoint_files import AUTO, FORMS, Writing
from prompt_tuning.checkpoints.run_store.checkpoint_selection import (
    Check,
    KeepBest,
    OnDamage,
    best_step,
    intact_states,
    latest_valid_step,
)
from prompt_tuning.checkpoints.run_store.checkpoint_state import sealed
from prompt_tuning.checkpoints.run_store.kept_prompts import KeptPrompts
from prompt_tuning.checkpoints.run_store.orbax_arrays import Leaf
from prompt_tuning.core.atomic_files import replace_file, sync_path
from prompt_tuning.core.errors import InputError, StorageError, shown
from prompt_tuning.core.file_names import check_links

_logger = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one run directory, opened by the process that trains there.

    Opening the store cleans up after a killed process: it deletes unfinished writes,
    and restores a checkpoint that was set aside for a replacement that never came.
    Processes that train alongside the writing one open the store read-only.

    Attributes:
      folder: `{run_directory}/numpy_checkpoints`, created by the first save.
      keep_last: number of newest checkpoints to keep.
      keep_best: metric and direction ("min" or "max") that choose the best checkpoint,
        which is kept, too.
      form: format of new checkpoints; see `Run.checkpoint_form`.
      kept_prompts: what to keep of deleted checkpoints.
    """

    def __init__(
        self,
        run_directory: Path | str,
        keep_last: int = 3,
        keep_best: KeepBest | None = None,
        *,
        form: str = AUTO,
        kept_prompts: KeptPrompts | None = None,
        read_only: bool = False,
    ):
        if form not in FORMS:
            raise InputError(
                f"the form of checkpoints is {shown(form)}, expected one of {FORMS}"
            )
        if keep_last < 1:
            raise InputError(f"keep_last is {keep_last}, expected at least 1")
        if keep_best is not None and keep_best[1] not in ("min", "max"):
            raise InputError(
                f"keep_best is {keep_best}, expected a metric and 'min' or 'max'"
            )
        self.folder = Path(run_directory) / checkpoint_names.FOLDER
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.form = form
        self.kept_prompts = kept_prompts or KeptPrompts()
        self._writes = not read_only
        self._pending: concurrent.futures.Future[None] | None = None
        check_links(self.folder.parent, checkpoint_names.FOLDER, checkpoint_names.KEPT)
        if self._writes:
            checkpoint_names.clean_up(self.folder)
            checkpoint_names.clean_up(self.folder.with_name(checkpoint_names.KEPT))

    def save(
        self,
        step: int,
        trained: Mapping[str, Any],
        optimizer_state: Any,
        extra: Mapping[str, Any],
        *,
        metrics: Mapping[str, float] | None = None,
    ) -> Path:
        """Writes a checkpoint in NumPy's formats, then deletes superseded ones.

        Args:
          step: step of the checkpoint; an existing one for the same step is replaced.
          trained: float32 arrays by slash-joined path.
          optimizer_state: tree of arrays.
          extra: JSON that `load` returns, e.g. key data and the example counter.
          metrics: metrics measured at this step; `keep_best` refers to one of them.

        Raises:
          InputError: if a leaf cannot be stored (see `check_storable`).
          StorageError: if the checkpoint cannot be written to the disk.
        """
        self.wait()
        checkpoint_files.check_storable(trained, optimizer_state)
        state = self._state(step, metrics, extra)
        with self._reporting_disk_errors(step):
            temporary = self._begin(step)
            checkpoint_files.write_files(temporary, trained, optimizer_state, state)
            return self._complete(temporary, step)

    def is_sharded(self, trained: Mapping[str, Any], optimizer_state: Any) -> bool:
        """Tests whether to save leaves of these shapes with `save_sharded`."""
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
        """Starts writing a checkpoint in Orbax's format, together with all processes.

        Returns as soon as the arrays have been copied to the host and may be donated.
        First waits for the previous save and raises its error, if any. Leaves have the
        padding of their mesh, and `shapes` do not. See `save` for the other arguments.

        Raises:
          InputError: if a leaf cannot be stored.
          StorageError: if this or the previous checkpoint cannot be written.
        """
        self.wait()
        checkpoint_files.check_storable(*shapes)
        with self._reporting_disk_errors(step):
            name = processes.run_on_first(lambda: self._begin(step).name)
            temporary = self.folder / name
            leaves = (trained, optimizer_state)
            writing = checkpoint_files.start_sharded(temporary, *leaves)
        # The background thread must not keep any device array alive.
        state = self._state(step, metrics, extra) | checkpoint_files.described(*shapes)
        background = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending = background.submit(self._finish, writing, temporary, state)
        background.shutdown(wait=False)

    def _finish(self, writing: Writing, temporary: Path, state: dict[str, Any]) -> None:
        """Publishes a checkpoint once all processes have written their shards."""
        with self._reporting_disk_errors(state["step"]):
            writing.wait()
            if self._writes:
                checkpoint_files.seal_sharded(temporary, state)
                self._complete(temporary, state["step"])

    @contextlib.contextmanager
    def _reporting_disk_errors(self, step: int) -> Iterator[None]:
        """Turns operating system errors into a `StorageError` with advice."""
        try:
            yield
        except OSError as error:
            steps = [saved for saved in self.steps() if saved != step]
            kept = f"that of step {steps[-1]} is kept" if steps else "there is none yet"
            raise StorageError(
                f"checkpoint_{step} could not be written to {self.folder}: {error}; "
                f"{kept}. Free some space or check the permissions, and start the "
                "same command again"
            ) from error

    def wait(self) -> None:
        """Waits for a save in progress and raises its error, if any."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Waits for the last save, for `contextlib.closing`."""
        self.wait()

    def steps(self) -> list[int]:
        """Returns the steps of all checkpoints, even damaged ones, ascending."""
        return checkpoint_names.steps_in(self.folder)

    def latest_valid(self, on_damage: OnDamage = _logger.warning) -> int | None:
        """Returns the newest intact step, or None; see `latest_valid_step`."""
        return latest_valid_step(self.folder, on_damage)

    def intact(self, on_damage: OnDamage = _logger.warning) -> list[int]:
        """Returns the steps of all intact checkpoints, ascending."""
        check = checkpoint_files.verify
        states = intact_states(self.folder, self.steps(), on_damage, check)
        return [step for step, _ in states]

    def replace_metrics(
        self, step: int, metrics: Mapping[str, float], without: str
    ) -> None:
        """Replaces the metrics that an intact checkpoint stores for its step.

        Also removes the key `without` from its `extra`.
        """
        directory = checkpoint_names.checkpoint_path(self.folder, step)
        state = checkpoint_files.read_state(directory)
        extra = {k: value for k, value in state["extra"].items() if k != without}
        state |= self._state(step, metrics, extra)
        with self._reporting_disk_errors(step):
            replace_file(directory / checkpoint_files.STATE_FILE, sealed(state))

    def best(self, on_damage: OnDamage = _logger.warning) -> int | None:
        """Returns the step with the best metric, or None; see `best_step`."""
        return best_step(self.folder, self.keep_best, on_damage)

    def load(
        self,
        step: int,
        optimizer_template: Any,
        *,
        trained_template: Mapping[str, Any] | None = None,
    ) -> tuple[dict[str, Leaf], Any, dict[str, Any]]:
        """Verifies and reads a checkpoint.

        `trained_template` has the expected trained leaves; None skips the check.

        Returns:
          trained leaves by path, the optimizer state as a tree like the template, and
          the saved `extra`. Leaves are NumPy arrays, or, in Orbax's format,
          `StoredArray`s that are read directly onto their devices.

        Raises:
          InputError: if the checkpoint is missing or damaged, or a leaf's name, shape
            or dtype differs from the template.
        """
        directory = checkpoint_names.checkpoint_path(self.folder, step)
        state = checkpoint_files.verify_own(directory)
        trained = checkpoint_files.open_trained(directory, state)
        if trained_template is not None:
            checkpoint_files.check_leaves(str(directory), trained, trained_template)
        optimizer = checkpoint_files.read_optimizer(directory, optimizer_template)
        return trained, optimizer, state["extra"]

    def _begin(self, step: int) -> Path:
        """Creates a temporary directory for a checkpoint, after cleaning up."""
        self._make_folder()
        checkpoint_names.clean_up(self.folder)
        temporary = self.folder / f"checkpoint_{step}.tmp-{os.getpid()}"
        temporary.mkdir()
        return temporary

    def _state(
        self, step: int, metrics: Mapping[str, float] | None, extra: Mapping[str, Any]
    ) -> dict[str, Any]:
        return {
            "step": step,
            "metrics": {name: float(x) for name, x in (metrics or {}).items()},
            "keep_best": self.keep_best,
            "extra": dict(extra),
        }

    def _complete(self, temporary: Path, step: int) -> Path:
        """Publishes a written checkpoint and deletes superseded ones."""
        final = checkpoint_names.checkpoint_path(self.folder, step)
        sync_path(temporary)
        checkpoint_names.publish(temporary, final)
        # The files were verified when written: reading the states is enough.
        self._prune(step, checkpoint_files.read_state)
        return final

    def _make_folder(self) -> None:
        """Creates the folder, and syncs its name and the run directory's."""
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True)
            sync_path(self.folder.parent)
            sync_path(self.folder.parent.parent)

    def finish_deletion(self, step: int) -> None:
        """Deletes the checkpoints that a killed process was about to delete.

        `step` is the intact checkpoint that the run resumes from.
        """
        if self._writes:
            self._prune(step, checkpoint_files.verify)

    def _prune(self, saved: int, check: Check) -> None:
        """Deletes all checkpoints except the newest, the best, and one step's.

        Later steps are ignored: they are left over from a run that resumed before a
        damaged checkpoint, so the given one may be the only intact checkpoint.
        """
        steps = [step for step in self.steps() if step <= saved]
        newest = {*steps[-self.keep_last :]}
        best = best_step(self.folder, self.keep_best, lambda _: None, check)
        for step in steps:
            if step not in newest and step != best:
                self.kept_prompts.keep(self.folder, step)
                checkpoint_names.delete(
                    checkpoint_names.checkpoint_path(self.folder, step)
                )
