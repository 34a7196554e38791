"""File names found in other files, and links among the files of a folder.

A checkpoint, an adapter or a run may come from anybody, so all of its files must be in
its folder. The folder itself may be a link. Links from a snapshot in huggingface_hub's
cache to cached files of the same repository are followed:

    models--NAME/snapshots/REVISION/FILE -> ../../blobs/HASH
"""

from pathlib import Path, PurePosixPath
from typing import Any

from prompt_tuning.core.errors import InputError, shown

MAXIMUM_NAME = 255
"""Maximum length in bytes of one part of a path, as in Linux file systems."""
MAXIMUM_PATH = 4095
"""Maximum length in bytes of a path, as in Linux."""


def check_name(name: Any, source: str) -> str:
    """Checks the relative path of a file that another file names, and returns it.

    Raises:
      InputError: unless it is a possible relative path without `..`.
    """
    reason = _fault(name)
    if reason is not None:
        raise InputError(
            f"{source} names the file {shown(name)}, {reason}; expected a path within "
            "the same folder"
        )
    return name


def path_within(folder: Path, name: Any, source: str) -> Path:
    """Returns the path of a file that another file names; see `check_name`.

    Raises:
      InputError: also if a symbolic link leads the path out of the folder.
    """
    path = folder / check_name(name, source)
    if not _leads_within(path, folder):
        raise InputError(
            f"{source} names the file {shown(name)}, which is a link out of {folder}; "
            "expected a file within it"
        )
    return path


def check_links(folder: Path, *names: str) -> None:
    """Checks that no entry of a folder is a link out of it.

    Args:
      folder: folder of a checkpoint, an adapter or a run.
      names: the entries to check; they may have wildcards.

    Raises:
      InputError: names the first link that leads out of the folder.
    """
    for name in names:
        for path in sorted(folder.glob(name)):
            if path.is_symlink() and not _leads_within(path, folder):
                raise InputError(
                    f"{path} is a link out of {folder}, to {shown(str(path.resolve()))}"
                    "; expected a file or folder within it: replace the link by a copy"
                )


def _leads_within(path: Path, folder: Path) -> bool:
    """Tests whether a path, with links followed, is in a folder or its repository.

    Raises:
      InputError: if links lead in a circle.
    """
    try:
        target, root = path.resolve(), folder.resolve()
    except (OSError, RuntimeError) as error:
        raise InputError(f"{path} cannot be followed: {error}") from error
    return any(target.is_relative_to(place) for place in (root, *_cached_files(root)))


def _cached_files(root: Path) -> list[Path]:
    """Returns where huggingface_hub's cache has the files of a snapshot."""
    snapshots = (x for x in (root, *root.parents) if x.parent.name == "snapshots")
    return [snapshot.parent.parent / "blobs" for snapshot in snapshots]


def _fault(name: Any) -> str | None:
    """Returns why a value cannot name a file in a folder, or None."""
    if not isinstance(name, str):
        return "which is not a text"
    parts = PurePosixPath(name).parts
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        return "which is not valid Unicode"
    if not parts or "\0" in name:
        return "which is empty or has a zero byte"
    if PurePosixPath(name).is_absolute() or ".." in parts:
        return "which leads out of the folder"
    if max(sizes) > MAXIMUM_NAME or sum(sizes) + len(sizes) > MAXIMUM_PATH:
        return f"which is longer than {MAXIMUM_NAME} bytes"
    return None
