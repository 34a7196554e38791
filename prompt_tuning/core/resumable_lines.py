"""A file of lines that can be continued after its command was killed.

The lines are in FILE.partial until the last one is written. FILE.partial-settings has
the settings that produced them, and only a command with equal settings continues them.
The partial file is created before its settings and renamed before they are deleted. So
settings without a partial file belong to a finished FILE.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from prompt_tuning.core import atomic_files
from prompt_tuning.core.errors import MAXIMUM_LINES, InputError, shown
from prompt_tuning.core.file_locks import hold_lock
from prompt_tuning.core.typed_json import read_object

SYNC_SECONDS = 10.0
"""Seconds after which new lines are on the disk, also if the power fails."""

SETTINGS, REPLACES = "settings", "replaces"
ANEW = "or start anew with --force"


class LineWriter:
    """The lines of a file, as far as they are written.

    Attributes:
      done: number of complete lines.
      complete: whether an earlier command finished the file.
    """

    def __init__(self, file: Path, replaces: bool):
        self.done, self.complete = 0, False
        self._file, self._replaces = file, replaces
        self._opened: IO[bytes] | None = None
        self._synced = time.monotonic()

    def resume(self, accepts: Callable[[bytes], bool]) -> None:
        """Opens the partial file, and cuts it after its last acceptable line."""
        with atomic_files.reporting_disk_errors(self._file):
            opened = partial_file(self._file).open("r+b")
            self._opened = opened
            end = 0
            for line in opened:
                if not (line.endswith(b"\n") and accepts(line)):
                    break
                end += len(line)
                self.done += 1
            opened.seek(end)
            opened.truncate()

    def write(self, line: str) -> None:
        """Appends a line, which survives if the process is killed.

        Raises:
          StorageError: if the disk is full.
        """
        assert self._opened is not None
        with atomic_files.reporting_disk_errors(self._file):
            self._opened.write(f"{line}\n".encode())
            self._opened.flush()
            if time.monotonic() - self._synced > SYNC_SECONDS:
                atomic_files.sync_file(self._opened)
                self._synced = time.monotonic()
        self.done += 1

    def finish(self) -> None:
        """Gives the file its name.

        Raises:
          InputError: if another command has created a file with this name.
        """
        if self._opened is not None:
            atomic_files.check_replaceable(self._file, force=self._replaces)
            with atomic_files.reporting_disk_errors(self._file):
                atomic_files.sync_file(self._opened)
                partial_file(self._file).replace(self._file)
                atomic_files.sync_path(self._file.parent)
        with atomic_files.reporting_disk_errors(self._file):
            settings_file(self._file).unlink()
            atomic_files.sync_path(self._file.parent)

    def close(self) -> None:
        """Closes the partial file."""
        if self._opened is not None:
            self._opened.close()


def partial_file(file: Path) -> Path:
    """Returns the path for the lines until they are complete."""
    return file.with_name(f"{file.name}.partial")


def settings_file(file: Path) -> Path:
    """Returns the path for the settings of a partial file."""
    return file.with_name(f"{file.name}.partial-settings")


def earlier_settings(file: Path) -> Mapping[str, Any]:
    """Returns the settings that an unfinished file was begun with; empty without one.

    Raises:
      InputError: if they cannot be read.
    """
    record = settings_file(file)
    return read_object(record).nested(SETTINGS).values if record.exists() else {}


def check_startable(file: Path, *, force: bool) -> None:
    """Checks that a file can be written, or an earlier command continued.

    Raises:
      InputError: if it exists and may not be replaced.
    """
    if not settings_file(file).exists():
        atomic_files.check_replaceable(file, force=force)


@contextlib.contextmanager
def resumable_lines(
    file: Path,
    settings: Mapping[str, Any],
    accepts: Callable[[bytes], bool],
    *,
    force: bool = False,
) -> Iterator[LineWriter]:
    """Yields a writer that begins a file, or continues an unfinished one.

    The file is finished at the end of the block, unless an error leaves it.

    Args:
      file: path of the file; its folder is created if needed.
      settings: everything that determines the lines, by name; values of JSON types.
      accepts: tests whether a complete line can be one of this file; called for each
        line of an earlier command, in order.
      force: whether to start over and replace an existing file.

    Raises:
      InputError: if an earlier command with other settings began the file, another
        process is writing it, or it exists and may not be replaced.
      StorageError: if the disk is full.
    """
    with contextlib.ExitStack() as stack:
        with atomic_files.reporting_disk_errors(file):
            lock = file.with_name(f".{file.name}.lock")
            stack.enter_context(hold_lock(lock, f"file {file}"))
        writer = _begin(file, json.loads(json.dumps(settings)), force)
        stack.callback(writer.close)
        if not writer.complete:
            writer.resume(accepts)
        yield writer
        writer.finish()


def _begin(file: Path, settings: dict[str, Any], force: bool) -> LineWriter:
    """Creates an empty partial file with its settings, or finds an earlier one."""
    partial, record = partial_file(file), settings_file(file)
    if not force and record.exists():
        stored = read_object(record)
        earlier = stored.nested(SETTINGS).values
        writer = LineWriter(file, stored.flag(REPLACES))
        if partial.exists():
            _check_same(partial, earlier, settings)
            return writer
        if earlier == settings and file.exists():
            writer.complete = True
            return writer
    elif not force and partial.exists() and partial.stat().st_size:
        raise InputError(
            f"{partial} has lines, and {record.name} with their settings is missing: "
            f"put it back, delete both, {ANEW}"
        )
    atomic_files.check_replaceable(file, force=force)
    with atomic_files.reporting_disk_errors(file):
        # First, so that no state of the disk has old lines with new settings.
        partial.write_bytes(b"")
        atomic_files.sync_path(partial)
        atomic_files.sync_path(file.parent)
        content = {REPLACES: force, SETTINGS: settings}
        atomic_files.replace_file(record, json.dumps(content, indent=1) + "\n")
    return LineWriter(file, force)


def _check_same(
    partial: Path, earlier: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
    """Checks that a partial file was begun with the same settings.

    Raises:
      InputError: lists the settings that differ.
    """
    names = [name for name in {**earlier, **now} if earlier.get(name) != now.get(name)]
    if not names:
        return
    listed = ", ".join(
        f"{name} ({shown(earlier.get(name))}, now {shown(now.get(name))})"
        for name in names[:MAXIMUM_LINES]
    )
    raise InputError(
        f"{partial} was begun with other settings: {listed}; give the same ones to "
        f"continue it, name another output, {ANEW}"
    )
