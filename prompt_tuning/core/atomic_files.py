"""Files and folders that are either complete or absent, even after a crash.

New content is written under a temporary name in the same folder, synced to the disk,
and renamed to its final name. `replace_file` and `replace_folder` do that alone;
`write_file` and `write_folder` also refuse to overwrite the user's data.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import IO

from prompt_tuning.core.errors import InputError


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
    """Creates a file, or replaces an existing one, in a single step.

    Args:
      file: path of the file, in an existing folder.
      content: new content; text is encoded as UTF-8.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        sync_path(temporary)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
    sync_path(file.parent)


def replace_folder(new: Path, final: Path, *, aside: Path) -> None:
    """Renames a complete folder to its final name.

    A folder cannot be renamed over another one, so an existing `final` is first renamed
    to `aside`, which the caller deletes afterwards. If the process dies between the two
    renames, `restore_folder` undoes the first one.

    Args:
      new: complete folder, already synced.
      final: name that the folder gets.
      aside: name that an existing `final` gets.
    """
    if final.exists():
        final.rename(aside)
    new.rename(final)
    sync_path(final.parent)


def restore_folder(aside: Path, final: Path) -> None:
    """Undoes an interrupted `replace_folder`: renames `aside` back if `final` is gone.

    Does nothing if `aside` does not exist or `final` does.
    """
    if aside.exists() and not final.exists():
        aside.rename(final)
        sync_path(final.parent)


def write_file(file: Path, content: str | bytes, *, force: bool = False) -> None:
    """Writes a file in a single step, without overwriting by accident.

    Args:
      file: path of the file; its folder is created if needed.
      content: content of the file; text is encoded as UTF-8.
      force: whether an existing file is replaced.

    Raises:
      InputError: if the path exists and may not be replaced.
    """
    if file.exists() and (not file.is_file() or not force):
        raise InputError(
            f"{file} already exists; --force replaces a file, or name another target"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, content)


def write_folder(
    folder: Path,
    write: Callable[[Path], None],
    *,
    known: Collection[str] = (),
    force: bool = False,
) -> None:
    """Writes a folder in a single step, without overwriting by accident.

    Args:
      folder: path of the folder; its parent is created if needed.
      write: function that writes the files into an empty folder.
      known: names of the files that may be replaced, because folders of this kind
        contain them.
      force: whether an existing folder is replaced if all its files are `known`.

    Raises:
      InputError: if the path exists and may not be replaced.
    """
    check_writable(folder, known=known, force=force)
    folder.parent.mkdir(parents=True, exist_ok=True)
    workspace = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    new, aside = workspace / "new", workspace / "old"
    try:
        new.mkdir()
        write(new)
        for path in (*new.iterdir(), new):
            sync_path(path)
        replace_folder(new, folder, aside=aside)
    finally:
        restore_folder(aside, folder)
        shutil.rmtree(workspace)


def check_writable(
    folder: Path, *, known: Collection[str] = (), force: bool = False
) -> None:
    """Checks that writing a folder would not destroy anything.

    Args:
      folder: see `write_folder`.
      known: see `write_folder`.
      force: see `write_folder`.

    Raises:
      InputError: with the files that would be lost.
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
            f"{folder} contains {', '.join(sorted(names))} already; --force replaces "
            "them, or name another target"
        )
