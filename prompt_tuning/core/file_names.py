"""Names of files that other files contain.

A file of a checkpoint or run may come from anybody, so the files that it names must be
in its folder.
"""

from pathlib import Path, PurePosixPath
from typing import Any

from prompt_tuning.core.errors import InputError, shown

MAXIMUM_NAME = 255
"""Maximum length in bytes of one part of a path, as in Linux file systems."""
MAXIMUM_PATH = 4095
"""Maximum length in bytes of a path, as in Linux."""


def check_name(name: Any, source: str) -> str:
    """Checks the relative path of a file that another file names.

    Args:
      name: value found.
      source: where it was found, for messages.

    Returns:
      The name.

    Raises:
      InputError: for anything but a relative path without `..` that a file can have.
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
      InputError: also for a path that a symbolic link leads out of the folder.
    """
    path = folder / check_name(name, source)
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError) as error:
        raise InputError(f"{path} cannot be followed: {error}") from error
    if not inside:
        raise InputError(
            f"{source} names the file {shown(name)}, which is a link out of {folder}; "
            "expected a file within it"
        )
    return path


def _fault(name: Any) -> str | None:
    """Returns why a value cannot be the name of a file in a folder; None if it can."""
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
