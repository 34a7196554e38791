"""Files and folders that are either complete or absent, even after a crash.

New content gets a temporary name in the same folder, is synced to disk, and is then
renamed. `replace_file` and `replace_folder` do only that; `write_file` and
`write_folder` also refuse to overwrite the user's data.

If a killed process leaves temporary files, the next write of the same file or folder
deletes them.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import IO

from prompt_tuning.core.errors import InputError, StorageError, is_disk_full
from prompt_tuning.core.file_locks import hold_lock
from prompt_tuning.core.setting_hints import how_to_set

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Arguments of Linux's `renameat2`, from linux/fcntl.h and linux/fs.h."""

_CANNOT_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)
"""Errors of a kernel or file system that cannot exchange two names."""


def sync_file(file: IO) -> None:
    """Flushes the content of an open file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Flushes the content of a closed file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(file: Path, content: str | bytes) -> None:
    """Creates or replaces a file in one step; text is encoded as UTF-8.

    Its folder must exist.
    """
    data = content.encode() if isinstance(content, str) else content
    _clear_temporaries(file)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as opened:
            _mark_as_used(opened)
            opened.write(data)
            sync_file(opened)
            temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
    sync_path(file.parent)


def _clear_temporaries(file: Path) -> None:
    """Deletes the temporary files that killed processes left next to a file."""
    pattern = re.compile(rf"\.{re.escape(file.name)}\.\d+\.tmp")
    for path in filter(
        lambda path: pattern.fullmatch(path.name), file.parent.iterdir()
    ):
        with contextlib.suppress(OSError), path.open("rb") as opened:
            # Fails while another process is writing it.
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _mark_as_used(file: IO) -> None:
    """Locks a temporary file, so that no other process takes it for a leftover."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def replace_folder(new: Path, final: Path, *, aside: Path) -> None:
    """Renames a complete folder, already synced, to its final name.

    An existing `final` becomes `aside`, for the caller to delete. Where the system can
    exchange two names, a complete folder named `final` exists at every moment.
    Elsewhere `final` is renamed to `aside` first; if the process dies before the second
    renaming, `restore_folder` undoes the first.
    """
    if not final.exists() or not any(final.iterdir()):
        # Fails if another process puts something there at this moment.
        new.rename(final)
    elif exchange(new, final):
        for folder in {final.parent, new.parent}:
            sync_path(folder)
        new.rename(aside)
    else:
        final.rename(aside)
        new.rename(final)
    # Both names must be on the disk before the caller deletes the old folder.
    for folder in {final.parent, aside.parent, new.parent}:
        sync_path(folder)


def exchange(one: Path, other: Path) -> bool:
    """Exchanges the names of two existing paths in a single step.

    Returns:
      False, with nothing changed, if the system cannot do it: not on Linux, or on some
        file systems.

    Raises:
      OSError: for any other problem.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    names = (os.fsencode(one), os.fsencode(other))
    if not rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE):
        return True
    number = ctypes.get_errno()
    if number in _CANNOT_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def restore_folder(aside: Path, final: Path) -> None:
    """Undoes an interrupted `replace_folder`: renames `aside` back if `final` is gone.

    Does nothing if `aside` does not exist or `final` does.
    """
    if aside.exists() and not final.exists():
        aside.rename(final)
        sync_path(final.parent)


def write_file(file: Path, content: str | bytes, *, force: bool = False) -> None:
    """Writes a file in one step, without overwriting by accident.

    Creates the file's folder if needed. Text is encoded as UTF-8, and `force` allows to
    replace an existing file.

    Raises:
      InputError: if the path exists and may not be replaced, or cannot be written.
      StorageError: if the disk is full.
    """
    check_replaceable(file, force=force)
    with reporting_disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, content)


def check_replaceable(file: Path, *, force: bool) -> None:
    """Checks that writing a file does not overwrite another by accident.

    Raises:
      InputError: if the path exists and is not a file, or may not be replaced.
    """
    if file.exists() and (not file.is_file() or not force):
        raise InputError(
            f"{file} already exists; {how_to_set('force', True)} replaces a file, or "
            "name another target"
        )


def check_named(folder: Path) -> None:
    """Checks that a folder's path has a name to derive temporary names from.

    Raises:
      InputError: if the path is empty or ends in `.`, `..` or the root.
    """
    if folder.name in ("", ".."):
        raise InputError(f"the folder {folder} has no name: name a new folder")


def write_folder(
    folder: Path,
    write: Callable[[Path], None],
    *,
    known: Collection[str] = (),
    force: bool = False,
) -> None:
    """Writes a folder in one step, without overwriting by accident.

    Args:
      folder: path of the folder; its parent is created if needed.
      write: function that writes the files into an empty folder.
      known: names of files that may be replaced, because such folders contain them.
      force: whether to replace an existing folder, if all its files are `known`.

    Raises:
      InputError: if the path has no name, exists and may not be replaced, cannot be
        written, or is being written by another process.
      StorageError: if the disk is full.
    """
    check_named(folder)
    workspace = folder.with_name(f".{folder.name}.writing")
    lock = folder.with_name(f".{folder.name}.lock")
    if not workspace.exists() and not lock.exists():
        check_writable(folder, known=known, force=force)
    with reporting_disk_errors(folder), hold_lock(lock, f"folder {folder}"):
        _clear_workspace(workspace, folder)
        check_writable(folder, known=known, force=force)
        new = workspace / "new"
        try:
            new.mkdir(parents=True)
            write(new)
            for path in (*sorted(new.rglob("*"), reverse=True), new):
                sync_path(path)
            # Another command may have put something there in the meantime.
            check_writable(folder, known=known, force=force)
            replace_folder(new, folder, aside=workspace / "old")
        finally:
            _clear_workspace(workspace, folder)


def _clear_workspace(workspace: Path, folder: Path) -> None:
    """Restores a folder that was set aside, and deletes its workspace."""
    restore_folder(workspace / "old", folder)
    if workspace.exists():
        shutil.rmtree(workspace)


@contextlib.contextmanager
def reporting_disk_errors(path: Path) -> Iterator[None]:
    """Turns the system's errors while a path is written into messages.

    Raises:
      StorageError: if the disk is full.
      InputError: if the path cannot be written for another reason.
    """
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise StorageError(
                f"{path} could not be written: {error}; what was there before is kept. "
                "Free some space and start the same command again"
            ) from error
        raise InputError(
            f"{path} cannot be written: {error.strerror or error}; choose another "
            "place, or check its permissions"
        ) from error


def check_writable(
    folder: Path, *, known: Collection[str] = (), force: bool = False
) -> None:
    """Checks that writing a folder would not destroy anything.

    Raises:
      InputError: lists the files that would be lost.
    """
    if not folder.exists() and not folder.is_symlink():
        return
    if not folder.is_dir() or folder.is_symlink():
        raise InputError(f"{folder} exists and is not a folder; name another target")
    names = {path.name for path in folder.iterdir()}
    if not names:
        return
    unknown = sorted(names.difference(known))
    if unknown:
        raise InputError(
            f"{folder} contains {', '.join(unknown[:5])}, which would be lost; name "
            "another target"
        )
    if not force:
        raise InputError(
            f"{folder} contains {', '.join(sorted(names))} already; "
            f"{how_to_set('force', True)} replaces them, or name another target"
        )
