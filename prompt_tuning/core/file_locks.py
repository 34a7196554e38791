"""Locks that keep two commands from writing to the same place together.

A lock is `flock` on a file, so the system releases it when its holder ends, even if
killed. The file also records who holds the lock and since when, for messages only.
"""

import contextlib
import datetime
import fcntl
import json
import os
import socket
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.typed_json import as_object, parse_json

HOLDER_SECONDS = 1.0
"""Time for which a refused command waits until the holder has written its name."""

MAXIMUM_HOLDER = 4096
"""Maximum size in bytes of the content of a lock file."""


@contextlib.contextmanager
def hold_lock(file: Path, work: str) -> Iterator[None]:
    """Holds a lock; creates missing folders, and removes them again if left empty.

    On a file system without locks it only warns.

    Args:
      file: path of the lock file, which exists only while the lock is held or after its
        holder was killed.
      work: what the lock protects, for the message, e.g. "run runs/first".

    Raises:
      InputError: if another process, or another part of this one, holds the lock.
      OSError: if the file cannot be created.
    """
    created: list[Path] = []
    try:
        descriptor = _acquire(file, work, created)
        try:
            yield
        finally:
            # Still locked: whoever opened this file finds that it is gone, and retries.
            with contextlib.suppress(OSError):
                file.unlink()
            os.close(descriptor)
    finally:
        for folder in reversed(created):
            with contextlib.suppress(OSError):
                folder.rmdir()


def _acquire(file: Path, work: str, created: list[Path]) -> int:
    """Opens and locks the file; returns its descriptor."""
    while True:
        _create_folders(file.parent, created)
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # another process has removed the folder that it made
            continue
        try:
            if _locks(descriptor, file, work) and not _is_at(descriptor, file):
                os.close(descriptor)
                continue
            _write_holder(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def _create_folders(folder: Path, created: list[Path]) -> None:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            created.append(path)


def _locks(descriptor: int, file: Path, work: str) -> bool:
    """Locks a file; returns False on a file system without locks.

    Raises:
      InputError: if it is locked already.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(
            f"{work} is being written by {_read_holder(descriptor)}: wait for it to "
            f"end, stop it, or choose another place (lock {file})"
        ) from error
    except OSError as error:
        warnings.warn(
            f"{file} cannot be locked ({error.strerror}): this file system has no "
            f"locks, so make sure that no other command writes {work}",
            stacklevel=2,
        )
        return False
    return True


def _is_at(descriptor: int, file: Path) -> bool:
    """Tests whether a path still names an open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


def _write_holder(descriptor: int) -> None:
    since = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    holder = {"host": socket.gethostname(), "process": os.getpid(), "since": since}
    # Only for messages: a full disk is reported by what is written next.
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, (json.dumps(holder) + "\n").encode(), 0)


def _read_holder(descriptor: int) -> str:
    """Returns the holder's host, process and time, for a message.

    Just after locking, the file may still be empty or name an earlier holder.
    """
    until = time.monotonic() + HOLDER_SECONDS
    holder = "another process"
    while time.monotonic() < until:
        try:
            text = os.pread(descriptor, MAXIMUM_HOLDER, 0)
            fields = as_object(parse_json(text, "the lock"), "the lock")
            host, process = fields.text("host"), fields.integer("process")
            since = fields.text("since")
        except InputError:
            time.sleep(0.02)
            continue
        holder = f"process {process} on {shown(host)} since {shown(since)}"
        if host != socket.gethostname() or _is_alive(process):
            break
        time.sleep(0.02)
    return holder


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except PermissionError:
        return True
    except ProcessLookupError:
        return False
    return True
