"""The prompts of checkpoints that were deleted.

    kept_prompts/
      checkpoint_{step}/      a checkpoint in NumPy's formats, without optimizer state

A checkpoint's prompts are copied there before it is deleted. Each saved step thus has
either a complete checkpoint or its prompts, at whatever moment the process is killed. A
run never resumes from them, and none of them is selected as its best checkpoint.
"""

import dataclasses
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from prompt_tuning.checkpoints.run_store import checkpoint_files
from prompt_tuning.checkpoints.run_store.checkpoint_names import (
    KEPT,
    checkpoint_path,
    delete,
    publish,
    steps_in,
)
from prompt_tuning.core.atomic_files import sync_path
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameter_groups import match_any

PROMPTS = r".*/prompt/.*"
ALL = "all"

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class KeptPrompts:
    """Chooses which prompts and other trained parameters outlive their checkpoint.

    Attributes:
      count: number of newest steps to keep, or "all".
      paths: expressions that match whole paths of further trained parameters.
    """

    count: int | Literal["all"] = 0
    paths: Sequence[str] = ()

    def keep(self, folder: Path, step: int) -> None:
        """Copies the prompts of a checkpoint that is about to be deleted.

        A damaged checkpoint, and one without a chosen parameter, has nothing to keep.

        Args:
          folder: `numpy_checkpoints` of a run.
          step: step of the checkpoint.
        """
        if self.count == 0:
            return
        try:
            self._copy(checkpoint_path(folder, step), folder.with_name(KEPT), step)
        except InputError as error:
            _logger.warning("%s; the prompts of step %d are not kept", error, step)
        self._prune(folder.with_name(KEPT))

    def _copy(self, directory: Path, kept: Path, step: int) -> None:
        state = checkpoint_files.verify_own(directory)
        chosen = match_any([PROMPTS, *self.paths])
        trained = checkpoint_files.open_trained(directory, state)
        leaves = {path: np.asarray(x) for path, x in trained.items() if chosen(path)}
        if not leaves:
            return
        if not kept.is_dir():
            kept.mkdir()
            sync_path(kept.parent)
        temporary = kept / f"checkpoint_{step}.tmp-{os.getpid()}"
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir()
        content = {name: state[name] for name in ("step", "metrics")} | {"extra": {}}
        checkpoint_files.write_files(temporary, leaves, (), content)
        sync_path(temporary)
        publish(temporary, checkpoint_path(kept, step))

    def _prune(self, kept: Path) -> None:
        """Deletes the prompts of all but the newest steps."""
        if self.count != ALL:
            for step in steps_in(kept)[: -self.count]:
                delete(checkpoint_path(kept, step))
