"""Types of options, which refuse values that no command can use."""

import argparse
import math
from typing import NoReturn

from prompt_tuning.core.errors import shortened, shown
from prompt_tuning.core.typed_json import MAXIMUM_INTEGER

MAXIMUM_MESSAGE = 1000
"""Maximum length of a message about an option."""


def integer(text: str) -> int:
    """Parses an integer of at most 32 bits.

    Raises:
      ArgumentTypeError: for anything else.
    """
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or abs(value) > MAXIMUM_INTEGER:
        raise argparse.ArgumentTypeError(
            f"found {shown(text)}, expected an integer from {-MAXIMUM_INTEGER:,} to "
            f"{MAXIMUM_INTEGER:,}"
        )
    return value


def number(text: str) -> float:
    """Parses a finite number.

    Raises:
      ArgumentTypeError: for anything else.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(
            f"found {shown(text)}, expected a finite number"
        )
    return value


class OptionParser(argparse.ArgumentParser):
    """Parser whose messages do not repeat long values."""

    def error(self, message: str) -> NoReturn:
        """Prints a message and exits with code 2."""
        super().error(shortened(message, MAXIMUM_MESSAGE))
