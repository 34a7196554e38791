"""The folder beside the output in which it is made, and what is kept to go on.

Everything is written there; the output appears by one rename. A process that was killed
leaves the folder, and the next one goes on from its last checkpoint if it was asked for
the same and the inputs are as they were.
"""

import contextlib
import dataclasses
import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from prompt_tuning.core.atomic_files import sync_file, sync_path
from prompt_tuning.core.errors import InputError

NEW = "new"
INDEX = "index"
COMPLETE = "complete"
_OLD = "old"
_IDENTITY = "identity.json"
_STATE = "state.npz"
_VALUES = "values"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Where a preparation was.

    Attributes:
      values: what JSON holds.
      arrays: the rest, by name.
    """

    values: dict[str, Any]
    arrays: Mapping[str, np.ndarray]


class Scratch:
    """The folder of one preparation; use `open_scratch`.

    Attributes:
      folder: the folder.
      output: what it becomes.
    """

    def __init__(self, output: Path):
        self.output = output
        self.folder = scratch_folder(output)

    def identity(self) -> Any:
        """What the preparation in the folder was asked for; None if there is none."""
        file = self.folder / _IDENTITY
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def begin(self, identity: Any) -> None:
        """Empties the folder for another preparation."""
        self._restore()
        for path in self.folder.iterdir():
            _remove(path)
        write_text(self.folder / _IDENTITY, json.dumps(identity, sort_keys=True))

    def save(self, checkpoint: Checkpoint) -> None:
        """Keeps a checkpoint in place of the one before."""
        values = np.frombuffer(json.dumps(checkpoint.values).encode(), np.uint8)
        temporary = self.folder / f"{_STATE}.tmp"
        with temporary.open("wb") as file:
            # Keywords would not take every name.
            np.savez(file, **{_VALUES: values, **checkpoint.arrays})  # pyright: ignore
            sync_file(file)
        temporary.replace(self.folder / _STATE)

    def load(self) -> Checkpoint | None:
        """The checkpoint that was kept last."""
        file = self.folder / _STATE
        if not file.exists():
            return None
        with np.load(file, allow_pickle=False) as content:
            arrays = {name: content[name] for name in content.files}
        values = json.loads(arrays.pop(_VALUES).tobytes())
        return Checkpoint(values, arrays)

    @property
    def was_published(self) -> bool:
        """Whether the output stands, and only the folder was left behind."""
        made = self.folder / NEW
        return self.output.exists() and not made.exists() and self._is_complete

    @property
    def _is_complete(self) -> bool:
        return (self.folder / COMPLETE).exists()

    def empty_new(self) -> Path:
        """An empty folder to write the output's files into."""
        made = self.folder / NEW
        _remove(self.folder / COMPLETE)
        _remove(made)
        made.mkdir()
        return made

    def publish(self) -> None:
        """Makes the new folder the output, in place of an older one."""
        made = self.folder / NEW
        for path in (*sorted(made.rglob("*")), made):
            sync_path(path)
        write_text(self.folder / COMPLETE, "")
        if self.output.exists():
            _remove(self.folder / _OLD)
            self.output.rename(self.folder / _OLD)
        made.rename(self.output)
        sync_path(self.output.parent)

    def remove(self) -> None:
        """Removes the folder; an older output that was set aside goes back."""
        self._restore()
        shutil.rmtree(self.folder)

    def _restore(self) -> None:
        old = self.folder / _OLD
        if old.exists() and not self.output.exists():
            old.rename(self.output)


def scratch_folder(output: Path) -> Path:
    """Where the files of an output are made."""
    return output.with_name(f".{output.name}.preparing")


@contextlib.contextmanager
def open_scratch(output: Path) -> Iterator[Scratch]:
    """Opens the scratch folder of an output for this process alone.

    Raises:
      InputError: if another process prepares the same output.
    """
    scratch = Scratch(output)
    scratch.folder.mkdir(parents=True, exist_ok=True)
    # Beside the folder, for the lock to outlive it.
    lock = scratch.folder.with_name(f"{scratch.folder.name}.lock")
    with lock.open("w") as file:
        _lock(file, output)
        try:
            yield scratch
        finally:
            # Empty if the preparation was refused before it began.
            with contextlib.suppress(OSError):
                scratch.folder.rmdir()
            if not scratch.folder.exists():
                lock.unlink(missing_ok=True)


def _lock(file: IO[str], output: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise InputError(
            f"output {output} is being prepared by another process: wait for it, or "
            "name another output"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Writes a small file that is there whole or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        sync_file(file)
    temporary.replace(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
