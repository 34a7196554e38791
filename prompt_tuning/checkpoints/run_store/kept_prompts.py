"""Prompts of deleted checkpoints.

    kept_prompts/
      checkpoint_{step}/      a checkpoint in NumPy's formats, without optimizer state
      frozen/                 frozen parameters that `Run.save_paths` matches, as .npy

A checkpoint's prompts are copied there before it is deleted, so whenever the process is
killed, each saved step has either a complete checkpoint or its prompts. A run never
resumes from them, and none of them is selected as its best checkpoint.
"""

import dataclasses
import io
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
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
from prompt_tuning.core.atomic_files import replace_file, sync_path
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameter_groups import match_any

FROZEN = "frozen"
PROMPTS = r".*/prompt/.*"
ALL = "all"

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class KeptPrompts:
    """Chooses which prompts and other trained parameters outlive their checkpoint.

    Attributes:
      count: number of newest steps to keep, or "all".
      paths: expressions that match whole paths of more trained parameters; see
        `keep_frozen` for the frozen ones.
    """

    count: int | Literal["all"] = 0
    paths: Sequence[str] = ()

    def keep(self, folder: Path, step: int) -> None:
        """Copies the prompts of a checkpoint before it is deleted.

        A damaged checkpoint, or one without a chosen parameter, has nothing to keep.
        """
        if self.count == 0:
            return
        try:
            self._copy(checkpoint_path(folder, step), folder.with_name(KEPT), step)
        except InputError as error:
            _logger.warning("%s; the prompts of step %d are not kept", error, step)
        self._prune(folder.with_name(KEPT))

    def keep_frozen(self, folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
        """Writes frozen parameters once: they are the same in every checkpoint.

        `folder` is the run's `numpy_checkpoints`. bfloat16 becomes float32, which is
        exact.
        """
        frozen = folder.with_name(KEPT) / FROZEN
        for path, array in arrays.items():
            file = frozen / checkpoint_files.file_name(path)
            if file.exists():
                continue
            frozen.mkdir(parents=True, exist_ok=True)
            stored, content = array.dtype.kind in "biuf", io.BytesIO()
            np.save(content, array if stored else array.astype(np.float32))
            replace_file(file, content.getvalue())

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
        """Deletes the prompts of all steps except the newest."""
        if self.count != ALL:
            for step in steps_in(kept)[: -self.count]:
                delete(checkpoint_path(kept, step))
