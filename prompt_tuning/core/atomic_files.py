"""Files and folders that are written whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.fsync import sync_path


def write_folder(
    folder: Path,
    write: Callable[[Path], None],
    *,
    known: Collection[str] = (),
    force: bool = False,
) -> None:
    """Fills a folder under another name, brings it to the disk, and renames it.

    Args:
      folder: the folder's name; its parent is made if it is not there.
      write: writes the files into an empty folder.
      known: names of files that a folder of this kind holds, which may be replaced.
      force: whether a folder that holds nothing else is replaced.

    Raises:
      InputError: if something stands there that may not be replaced.
    """
    check_writable(folder, known=known, force=force)
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        made = aside / "new"
        made.mkdir()
        write(made)
        for path in (*made.iterdir(), made):
            sync_path(path)
        if folder.exists():
            folder.rename(aside / "old")
        made.rename(folder)
        sync_path(folder.parent)
    finally:
        old = aside / "old"
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(aside)


def check_writable(
    folder: Path, *, known: Collection[str] = (), force: bool = False
) -> None:
    """Refuses to write over what may be somebody's; arguments as for `write_folder`.

    Raises:
      InputError: with what stands there.
    """
    if not folder.exists() and not folder.is_symlink():
        return
    if not folder.is_dir() or folder.is_symlink():
        raise InputError(f"{folder} is there and is no folder; name another target")
    names = {path.name for path in folder.iterdir()}
    if not names:
        return
    strangers = sorted(names.difference(known))
    if strangers:
        raise InputError(
            f"{folder} holds {', '.join(strangers[:5])}, which would be lost; name "
            "another target"
        )
    if not force:
        raise InputError(
            f"{folder} holds {', '.join(sorted(names))} already; --force replaces "
            "them, or name another target"
        )


def write_file(file: Path, content: bytes, *, force: bool = False) -> None:
    """Writes a file under another name, brings it to the disk, and renames it.

    Args:
      file: its name; its folder is made if it is not there.
      content: what it holds.
      force: whether a file that is there is replaced.

    Raises:
      InputError: if something stands there that may not be replaced.
    """
    if file.exists() and (not file.is_file() or not force):
        raise InputError(
            f"{file} is there already; --force replaces a file, or name another target"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        sync_path(temporary)
        temporary.rename(file)
    finally:
        temporary.unlink(missing_ok=True)
    sync_path(file.parent)
