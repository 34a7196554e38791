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
    sync_file,
    sync_path,
)
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.numpy_files import read_npz
from prompt_tuning.core.typed_json import parse_json, read_limited

NEW = "new"
INDEX = "index"
COMPLETE = "complete"
_OLD = "old"
_IDENTITY = "identity.json"
_STATE = "state.npz"
_VALUES = "values"
MAXIMUM_IDENTITY = 2**26
"""Maximum size in bytes of the identity of a preparation, which names all inputs."""


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
      published: identity of the preparation that published the output, whose directory
        may be removed in part; None if there is none.

    Args:
      output: folder that the result is moved to.
      lock: file next to the directory, open and locked; it has the identity of a
        preparation from when its output is published until the directory is removed.
    """

    def __init__(self, output: Path, lock: IO[bytes]):
        self.output = output
        self.path = scratch_path(output)
        self._lock = lock
        lock.seek(0)
        self.published = _parse_identity(lock.read(MAXIMUM_IDENTITY))

    def identity(self) -> Any:
        """Returns the identity of the preparation in the directory, None if empty."""
        try:
            content = read_limited(self.path / _IDENTITY, MAXIMUM_IDENTITY)
        except InputError:
            return None
        return _parse_identity(content)

    def begin(self, identity: Any) -> None:
        """Empties the directory for a new preparation."""
        self._lock.truncate(0)
        restore_folder(self.path / _OLD, self.output)
        self._withdraw_complete()
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
        try:
            arrays = read_npz(file)
            values = parse_json(arrays.pop(_VALUES).tobytes(), str(file))
        except (InputError, KeyError) as error:
            raise InputError(
                f"{file} is damaged ({error}): add --force to start again"
            ) from error
        return ScratchCheckpoint(values, arrays)

    def was_published(self, identity: Any) -> bool:
        """Whether a preparation is finished except for the removal of this directory.

        Args:
          identity: identity of the preparation.
        """
        if not self.output.exists():
            return False
        if self.published == identity:
            return True
        is_complete = (self.path / COMPLETE).exists()
        is_renamed = is_complete and not (self.path / NEW).exists()
        if not is_renamed or self.identity() != identity:
            return False
        self._record_identity()
        return True

    def create_new(self) -> Path:
        """Creates an empty folder for the output's files."""
        new = self.path / NEW
        self._withdraw_complete()
        _remove(new)
        new.mkdir()
        # On the disk before `COMPLETE`, or its absence would mean that it was renamed.
        sync_path(self.path)
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
        self._record_identity()

    def _record_identity(self) -> None:
        """Writes to the lock that the output is published, before the removal."""
        self._lock.truncate(0)
        self._lock.write(json.dumps(self.identity()).encode())
        sync_file(self._lock)
        sync_path(self.path.parent)

    def _withdraw_complete(self) -> None:
        """Removes `COMPLETE` first: with it, a missing `NEW` would count as renamed."""
        _remove(self.path / COMPLETE)
        sync_path(self.path)

    def remove(self) -> None:
        """Removes the directory, after restoring an older output that was set aside."""
        restore_folder(self.path / _OLD, self.output)
        for path in self.path.iterdir():
            _remove(path)
        # On the disk before the lock, which identifies the output, is deleted.
        sync_path(self.path)
        self.path.rmdir()
        sync_path(self.path.parent)


def _parse_identity(content: bytes) -> Any:
    try:
        return parse_json(content, "the identity")
    except InputError:  # it is empty, or was being written
        return None


def scratch_path(output: Path) -> Path:
    """Returns the path of an output's scratch directory."""
    return output.with_name(f".{output.name}.preparing")


@contextlib.contextmanager
def open_scratch(output: Path) -> Iterator[ScratchDirectory]:
    """Opens the scratch directory of an output exclusively.

    Raises:
      InputError: if another process prepares the same output.
    """
    path = scratch_path(output)
    path.mkdir(parents=True, exist_ok=True)
    # Next to the directory, so that the lock outlives it.
    lock = path.with_name(f"{path.name}.lock")
    with lock.open("a+b") as file:
        _lock(file, output)
        scratch = ScratchDirectory(output, file)
        try:
            yield scratch
        finally:
            # It is empty if the settings were rejected before any work began.
            with contextlib.suppress(OSError):
                scratch.path.rmdir()
            if not scratch.path.exists():
                lock.unlink(missing_ok=True)


def _lock(file: IO[bytes], output: Path) -> None:
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
