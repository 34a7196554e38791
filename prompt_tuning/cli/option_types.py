"""Option types, which refuse values that no command can use."""

import argparse
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NoReturn, get_args

from prompt_tuning.core.errors import InputError, shortened, shown
from prompt_tuning.core.number_ranges import (
    AnyInteger,
    AnyNumber,
    NonnegativeInteger,
    NumberRange,
    Penalty,
    range_of,
)
from prompt_tuning.core.private_parts import options_of
from prompt_tuning.core.typed_json import MAXIMUM_INTEGER, parse_json

MAXIMUM_MESSAGE = 1000
"""Maximum length of a message about an option."""


@dataclasses.dataclass(frozen=True)
class Number:
    """Option type of a number in a range.

    With `whole`, it is an integer of at most 32 bits.
    """

    bounds: NumberRange
    whole: bool = False

    def __call__(self, text: str) -> Any:
        """Parses a number."""
        try:
            value = int(text) if self.whole else float(text)
        except ValueError:
            value = math.nan
        if value not in self.limits:
            raise argparse.ArgumentTypeError(
                f"found {shown(text)}, expected {self._expected}"
            )
        return value

    @property
    def limits(self) -> NumberRange:
        """The range, within that of integers of 32 bits."""
        if not self.whole:
            return self.bounds
        return dataclasses.replace(
            self.bounds,
            minimum=max(self.bounds.minimum, -MAXIMUM_INTEGER),
            maximum=min(self.bounds.maximum, MAXIMUM_INTEGER),
        )

    @property
    def _expected(self) -> str:
        expected = str(self.limits)
        return expected.replace("a number", "an integer") if self.whole else expected


def numeric(hint: Any) -> Number:
    """Returns the option type for a type such as `PositiveInteger`."""
    return Number(range_of(hint), whole=get_args(hint)[0] is int)


integer, number = numeric(AnyInteger), numeric(AnyNumber)
_token, _bias = numeric(NonnegativeInteger), numeric(Penalty)


def token_ids(text: str) -> tuple[int, ...]:
    """Parses comma-separated token ids."""
    return tuple(_token(part) for part in text.split(","))


def token_biases(text: str) -> dict[int, float]:
    """Parses token ids with a number for each, e.g. `5=-1.5,17=2`."""
    biases = {}
    for part in text.split(","):
        token, equals, value = part.partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(
                f"found {shown(part)}, expected ID=NUMBER, as in 5=-1.5,17=2"
            )
        biases[_token(token)] = _bias(value)
    return biases


def json_object(text: str) -> dict[str, Any]:
    """Parses a JSON object, e.g. `{"enable_thinking": false}`."""
    try:
        value = parse_json(text, "the value")
    except InputError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from problem
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"found {shown(value)}, expected an object of JSON, as in "
            '{"enable_thinking": false}'
        )
    return value


def find_subparsers(
    parser: argparse.ArgumentParser,
) -> Mapping[str, argparse.ArgumentParser]:
    """Returns the parsers of a program's commands, by name."""
    for action in options_of(parser):
        if action.nargs == argparse.PARSER:
            return action.choices
    return {}


def state_defaults(parser: argparse.ArgumentParser) -> None:
    """Adds defaults that are numbers or texts to the help of options."""
    for action in options_of(parser):
        default, text = action.default, action.help or ""
        plain = isinstance(default, int | float | str) and not isinstance(default, bool)
        if plain and default not in ("", argparse.SUPPRESS):
            value = f"{default:g}" if isinstance(default, float) else default
            action.help = f"{text} (default: {value})"


class OptionParser(argparse.ArgumentParser):
    """A parser whose error messages do not repeat long values."""

    def error(self, message: str) -> NoReturn:
        """Prints a message and exits with code 2."""
        super().error(shortened(message, MAXIMUM_MESSAGE))


def duration(text: str) -> float:
    """Parses a time such as `90s`, `5m` or `1.5h` to seconds."""
    units = {"s": 1, "m": 60, "h": 3600}
    try:
        seconds = float(text[:-1]) * units[text[-1:]]
    except (KeyError, ValueError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(
            f"found {shown(text)}, expected a time such as 90s, 5m or 1.5h"
        )
    return seconds
