"""The scratch directory next to an output, in which the output is built.

All files are written there, and the output appears by a single rename. A process that
is killed leaves the directory there; the next one resumes from its last checkpoint if
the settings and the inputs are unchanged.
"""

import contextlib
import dataclasses
import fcntl
import io
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from prompt_tuning.core.atomic_files import (
    replace_file,
    replace_folder,
    restore_folder,
    sync_path,
)
from prompt_tuning.core.errors import InputError

NEW = "new"
INDEX = "index"
COMPLETE = "complete"
_OLD = "old"
_IDENTITY = "identity.json"
_STATE = "state.npz"
_VALUES = "values"


@dataclasses.dataclass(frozen=True)
class ScratchCheckpoint:
    """Saved state of a preparation.

    Attributes:
      values: the part that is stored as JSON.
      arrays: the arrays by name.
    """

    values: dict[str, Any]
    arrays: Mapping[str, np.ndarray]


class ScratchDirectory:
    """The scratch directory of one preparation; use `open_scratch` to create it.

    Attributes:
      path: path of the directory.
      output: folder that the result is moved to.
    """

    def __init__(self, output: Path):
        self.output = output
        self.path = scratch_path(output)

    def identity(self) -> Any:
        """Returns the identity of the preparation in the directory, None if empty."""
        file = self.path / _IDENTITY
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def begin(self, identity: Any) -> None:
        """Empties the directory for a new preparation."""
        restore_folder(self.path / _OLD, self.output)
        for path in self.path.iterdir():
            _remove(path)
        replace_file(self.path / _IDENTITY, json.dumps(identity, sort_keys=True))

    def save(self, checkpoint: ScratchCheckpoint) -> None:
        """Replaces the checkpoint."""
        values = np.frombuffer(json.dumps(checkpoint.values).encode(), np.uint8)
        content = io.BytesIO()
        # The stubs of `savez` take no mapping of names to arrays.
        np.savez(content, **{_VALUES: values, **checkpoint.arrays})  # pyright: ignore
        replace_file(self.path / _STATE, content.getvalue())

    def load(self) -> ScratchCheckpoint | None:
        """Reads the last checkpoint; None if there is none."""
        file = self.path / _STATE
        if not file.exists():
            return None
        with np.load(file, allow_pickle=False) as content:
            arrays = {name: content[name] for name in content.files}
        values = json.loads(arrays.pop(_VALUES).tobytes())
        return ScratchCheckpoint(values, arrays)

    @property
    def was_published(self) -> bool:
        """Whether the output is complete and only this directory was not removed."""
        new = self.path / NEW
        return self.output.exists() and not new.exists() and self._is_complete

    @property
    def _is_complete(self) -> bool:
        return (self.path / COMPLETE).exists()

    def create_new(self) -> Path:
        """Creates an empty folder for the output's files."""
        new = self.path / NEW
        _remove(self.path / COMPLETE)
        _remove(new)
        new.mkdir()
        return new

    def publish(self) -> None:
        """Renames the new folder to the output, replacing an older one."""
        new = self.path / NEW
        for path in (*sorted(new.rglob("*")), new):
            sync_path(path)
        replace_file(self.path / COMPLETE, "")
        if self.output.exists():
            _remove(self.path / _OLD)
        replace_folder(new, self.output, aside=self.path / _OLD)

    def remove(self) -> None:
        """Removes the directory, after restoring an older output that was set aside."""
        restore_folder(self.path / _OLD, self.output)
        shutil.rmtree(self.path)


def scratch_path(output: Path) -> Path:
    """Returns the path of an output's scratch directory."""
    return output.with_name(f".{output.name}.preparing")


@contextlib.contextmanager
def open_scratch(output: Path) -> Iterator[ScratchDirectory]:
    """Opens the scratch directory of an output exclusively.

    Raises:
      InputError: if another process prepares the same output.
    """
    scratch = ScratchDirectory(output)
    scratch.path.mkdir(parents=True, exist_ok=True)
    # Next to the directory, so that the lock outlives it.
    lock = scratch.path.with_name(f"{scratch.path.name}.lock")
    with lock.open("w") as file:
        _lock(file, output)
        try:
            yield scratch
        finally:
            # It is empty if the settings were rejected before any work began.
            with contextlib.suppress(OSError):
                scratch.path.rmdir()
            if not scratch.path.exists():
                lock.unlink(missing_ok=True)


def _lock(file: IO[str], output: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise InputError(
            f"output {output} is being prepared by another process: wait for it to "
            "finish, or choose another output"
        ) from error


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
