"""Types of options, which refuse values that no command can use."""

import argparse
import dataclasses
import math
from collections.abc import Mapping
from typing import NoReturn

from prompt_tuning.core.errors import shortened, shown
from prompt_tuning.core.typed_json import MAXIMUM_INTEGER

MAXIMUM_MESSAGE = 1000
"""Maximum length of a message about an option."""


@dataclasses.dataclass(frozen=True)
class Integer:
    """Type of an option that is an integer.

    Attributes:
      maximum: largest value; negative values have the same limit. Commands check what
        is too small for them.
    """

    maximum: int = MAXIMUM_INTEGER

    def __call__(self, text: str) -> int:
        """Parses an integer.

        Raises:
          ArgumentTypeError: for anything else, and beyond the limit.
        """
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or abs(value) > self.maximum:
            raise argparse.ArgumentTypeError(
                f"found {shown(text)}, expected an integer from {-self.maximum:,} to "
                f"{self.maximum:,}"
            )
        return value


integer = Integer()


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


def token_ids(text: str) -> tuple[int, ...]:
    """Parses ids of tokens with commas between them.

    Raises:
      ArgumentTypeError: for anything else.
    """
    return tuple(integer(part) for part in text.split(","))


def token_biases(text: str) -> dict[int, float]:
    """Parses ids of tokens, each with a number, as in `5=-1.5,17=2`.

    Raises:
      ArgumentTypeError: for anything else.
    """
    biases = {}
    for part in text.split(","):
        token, equals, value = part.partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(
                f"found {shown(part)}, expected ID=NUMBER, as in 5=-1.5,17=2"
            )
        biases[integer(token)] = number(value)
    return biases


def find_subparsers(
    parser: argparse.ArgumentParser,
) -> Mapping[str, argparse.ArgumentParser]:
    """Returns the parsers of a program's commands, by command name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    return {}


def state_defaults(parser: argparse.ArgumentParser) -> None:
    """Adds to the help of options the defaults that are numbers or texts."""
    for action in parser._actions:
        default, text = action.default, action.help or ""
        plain = isinstance(default, int | float | str) and not isinstance(default, bool)
        if plain and default not in ("", argparse.SUPPRESS):
            value = f"{default:g}" if isinstance(default, float) else default
            action.help = f"{text} (default: {value})"


class OptionParser(argparse.ArgumentParser):
    """Parser whose messages do not repeat long values."""

    def error(self, message: str) -> NoReturn:
        """Prints a message and exits with code 2."""
        super().error(shortened(message, MAXIMUM_MESSAGE))
