"""The errors that are the user's to mend."""

import difflib
from collections.abc import Sequence

LISTED = 12


class InputError(ValueError):
    """Input (a file, a config, an argument) that cannot be used as it is.

    Its message says what was found, what was expected, where it came from and what to
    do. The command prints the message alone and exits with code 2; no step has been
    compiled and nothing written over when it is raised.
    """


class NotFiniteError(RuntimeError):
    """The loss or a trained number is no longer finite; nothing of it was saved.

    The command prints the message alone and exits with code 1.
    """


class StorageError(RuntimeError):
    """A checkpoint that could not be written: the disk is full, a folder not to be had.

    Its message says what the system said, what is kept, and what to do. The command
    prints the message alone and exits with code 1.
    """


def differences(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """The first lines in which two texts differ, those of one with -, the other's +."""
    lines = difflib.unified_diff(before, after, n=0, lineterm="")
    found = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    return found[:LISTED]
