"""The scratch directory next to an output, for unfinished work.

It has the index of the records, the encoded shards, and a folder with the output's
files, which gets its final name by a single rename. If a process is killed, the
directory stays, and the next process with equal settings and inputs keeps the shards.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prompt_tuning.core import atomic_files, file_locks
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.typed_json import read_object

MAXIMUM_IDENTITY = 2**26
"""Maximum size in bytes of the identity of a preparation, which names all inputs."""

_NEW, _OLD, _SHARDS = "new", "old", "shards"
_BEGUN = "identity.json"
"""File with the identity of a preparation that has begun."""
_COMPLETE = "complete.json"
"""Name of this file from when the output's files are complete."""


class ScratchDirectory:
    """The scratch directory of one preparation; use `open_scratch` to create it.

    Attributes:
      output: folder that the result is moved to.
      path: path of the directory.
      shards: folder for the encoded shards.
      identity: identity of the preparation in the directory; empty without one.
    """

    def __init__(self, output: Path):
        self.output = output
        self.path = scratch_path(output)
        self.shards = self.path / _SHARDS
        self.identity: dict[str, Any] = {}
        for name in (_COMPLETE, _BEGUN):
            with contextlib.suppress(InputError):  # it is missing
                content = read_object(self.path / name, maximum_bytes=MAXIMUM_IDENTITY)
                self.identity = dict(content.values)

    @property
    def is_published(self) -> bool:
        """Whether all is done, except for the removal of this directory."""
        is_renamed = not (self.path / _NEW).exists() and self.output.exists()
        return (self.path / _COMPLETE).exists() and is_renamed

    def begin(self, identity: dict[str, Any]) -> None:
        """Empties the directory for a new preparation."""
        # First: they tell what else is here.
        for name in (_COMPLETE, _BEGUN):
            _remove(self.path / name)
        atomic_files.sync_path(self.path)
        for path in self.path.iterdir():
            _remove(path)
        atomic_files.replace_file(
            self.path / _BEGUN, json.dumps(identity, sort_keys=True)
        )
        self.identity = identity

    def create_new(self) -> Path:
        """Creates an empty folder for the output's files, and one for shards."""
        if (self.path / _COMPLETE).exists():
            (self.path / _COMPLETE).replace(self.path / _BEGUN)
            atomic_files.sync_path(self.path)
        new = self.path / _NEW
        _remove(new)
        new.mkdir()
        self.shards.mkdir(exist_ok=True)
        return new

    def publish(self) -> None:
        """Renames the new folder to the output, replacing an older one."""
        new = self.path / _NEW
        for path in (*sorted(new.rglob("*")), new):
            atomic_files.sync_path(path)
        atomic_files.sync_path(self.path)
        (self.path / _BEGUN).replace(self.path / _COMPLETE)
        atomic_files.sync_path(self.path)
        _remove(self.path / _OLD)
        atomic_files.replace_folder(new, self.output, aside=self.path / _OLD)

    def remove(self) -> None:
        """Removes the directory, and last the file that says that all is done."""
        for path in self.path.iterdir():
            if path.name != _COMPLETE:
                _remove(path)
        atomic_files.sync_path(self.path)
        shutil.rmtree(self.path)
        atomic_files.sync_path(self.path.parent)


def scratch_path(output: Path) -> Path:
    """Returns the path of an output's scratch directory."""
    return output.with_name(f".{output.name}.preparing")


@contextlib.contextmanager
def open_scratch(output: Path) -> Iterator[ScratchDirectory]:
    """Opens the scratch directory of an output exclusively.

    A second process that prepares the same output gets an InputError.
    """
    path = scratch_path(output)
    lock = path.with_name(f"{path.name}.lock")
    with contextlib.ExitStack() as stack:
        with atomic_files.reporting_disk_errors(output):
            stack.enter_context(file_locks.hold_lock(lock, f"output {output}"))
            path.mkdir(exist_ok=True)
        atomic_files.restore_folder(path / _OLD, output)
        try:
            yield ScratchDirectory(output)
        finally:
            # The settings were refused before any work began, or all is done.
            if not any((path / name).exists() for name in (_COMPLETE, _BEGUN)):
                shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
