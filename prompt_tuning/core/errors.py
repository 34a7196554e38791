"""Errors caused by user input or by the environment."""

import difflib
import errno
from collections.abc import Iterable, Sequence

MAXIMUM_LINES = 12
BEGINNING = 4
"""Number of equal first letters of names that are near."""
MAXIMUM_SHOWN = 200
"""Maximum length of a foreign value in a message."""


class InputError(ValueError):
    """Invalid input: a file, a config or an argument.

    The message says what was found, what was expected, where it came from and what to
    do. The command line prints only this message and exits with code 2. It is raised
    before any step is compiled and before anything is overwritten.

    Examples:
      >>> pt.SoftPrompt(lenght=5)
      Traceback (most recent call last):
      ...
      prompt_tuning.core.errors.InputError: SoftPrompt has no parameter 'lenght'; ...
    """


class NotFiniteError(RuntimeError):
    """The loss or a trained number is no longer finite; none of it was saved.

    The command line prints only the message and exits with code 1.
    """


DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""Errors of the operating system that no other input avoids: no space, a quota, the
maximum size of a file, and a defect of the disk."""


class StorageError(RuntimeError):
    """Something could not be written, e.g. because the disk is full.

    The message gives the system's error, what is kept, and what to do. The command line
    prints only the message and exits with code 1.
    """


def is_disk_full(error: OSError) -> bool:
    """Tests whether an error of the operating system is one of `DISK_FULL`."""
    return error.errno in DISK_FULL


def shown(value: object) -> str:
    """Formats a foreign value for a message: on one line, and short."""
    try:
        text = repr(value[:MAXIMUM_SHOWN] if isinstance(value, str | bytes) else value)
    except (ValueError, RecursionError):  # an integer of thousands of digits
        text = f"{type(value).__name__} that is too long to print"
    if isinstance(value, str | bytes) and len(value) > MAXIMUM_SHOWN:
        return f"{text[:MAXIMUM_SHOWN]}... ({len(value):,} characters)"
    if len(text) > MAXIMUM_SHOWN:
        return f"{text[:MAXIMUM_SHOWN]}... ({len(text):,} characters)"
    return text


def kind_of(value: object) -> str:
    """Returns the name of a value's type with its article, e.g. "an int"."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeiou' else 'a'} {name}"


def shortened(text: str, maximum: int = MAXIMUM_SHOWN) -> str:
    """Cuts a text to the length that messages show, without quotes."""
    if len(text) <= maximum:
        return text
    return f"{text[:maximum]}... ({len(text):,} characters)"


def differences(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Returns the first lines removed (`-`) or added (`+`) between two texts."""
    diff = difflib.unified_diff(before, after, n=0, lineterm="")
    lines = [line for line in diff if not line.startswith(("---", "+++", "@@"))]
    return [shortened(line) for line in lines[:MAXIMUM_LINES]]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Ends a message about an unknown name: with a question, or with all known names.

    A known name is close if most letters agree, or the first four.
    """
    names = sorted(known)
    short = name[:MAXIMUM_SHOWN]
    near = difflib.get_close_matches(short, names, n=3)
    near = near or [
        known_name
        for known_name in names
        if known_name[:BEGINNING] == short[:BEGINNING]
    ]
    if near:
        return f"; did you mean {' or '.join(near[:3])}?"
    return f"; expected {' or '.join(names)}" if names else ""
