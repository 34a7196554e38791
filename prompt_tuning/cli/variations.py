"""The grid of settings in `--vary` arguments, one point per sweep member."""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from prompt_tuning.core.errors import InputError

SHAPE = (
    "--vary NAME=VALUE,VALUE,... or --vary NAME,NAME=(VALUE,VALUE),(VALUE,VALUE),..."
)
BRACKETS = {"(": ")", "[": "]", "{": "}"}
LONGEST_DIRECTORY = 200
LONGEST = 40


@dataclasses.dataclass(frozen=True)
class Variation:
    """Settings of one member.

    Attributes:
      name: name of the member's directory, e.g. `seed=0,learning_rate=0.3`.
      bindings: values in gin's form, by the names that they are bound to.
    """

    name: str
    bindings: Mapping[str, str]

    @property
    def lines(self) -> list[str]:
        """The bindings as lines of gin."""
        return [f"{name} = {value}" for name, value in self.bindings.items()]

    @property
    def varies(self) -> dict[str, str]:
        """The bindings under their shortest unique names."""
        names = short_names(list(self.bindings))
        return dict(zip(names, self.bindings.values(), strict=True))


def parse_variations(arguments: Sequence[str]) -> list[Variation]:
    """Parses `--vary` arguments to members, one per combination of values.

    The values of the last argument vary fastest.

    Args:
      arguments: each `NAME=VALUE,VALUE,...`, or `NAME,NAME=(VALUE,VALUE),...` for
        values that change together. Commas inside brackets and quotes do not separate
        values.

    Raises:
      InputError: if an argument cannot be parsed, or two members would be the same.
    """
    axes = [_parse_argument(argument) for argument in arguments]
    names = [name for axis in axes for name in axis[0]]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{name} is varied twice; list all values in one --vary")
    grid = [
        dict(itertools.chain(*map(dict.items, point)))
        for point in itertools.product(*(axis for axis in axes))
    ]
    for index, point in enumerate(grid):
        if point in grid[:index]:
            shown = ", ".join(f"{name}={value}" for name, value in point.items())
            raise InputError(f"two members would be the same: {shown}")
    return [
        Variation(name, point)
        for name, point in zip(_directory_names(grid), grid, strict=True)
    ]


def _parse_argument(argument: str) -> list[dict[str, str]]:
    """Parses one argument to its values, each by the names that it is bound to."""
    left, equals, right = argument.partition("=")
    names, values = left.split(","), list(_split_values(right))
    if not equals or not all(map(str.strip, names)) or not all(values):
        raise InputError(f"--vary {argument} cannot be read; expected {SHAPE}")
    names = [name.strip() for name in names]
    if len(names) == 1:
        return [{names[0]: value} for value in values]
    points = []
    for value in values:
        parts = list(_split_values(value[1:-1])) if value[0] + value[-1] == "()" else []
        if len(parts) != len(names) or not all(parts):
            raise InputError(
                f"--vary {argument}: {value} is not one value for each of "
                f"{', '.join(names)}; expected {SHAPE}"
            )
        points.append(dict(zip(names, parts, strict=True)))
    return points


def _split_values(text: str) -> Iterator[str]:
    """Splits a text at its commas outside of brackets and quotes."""
    part, closing = "", []
    for letter in text:
        if closing and closing[-1] in "'\"":
            if letter == closing[-1] and not part.endswith("\\"):
                closing.pop()
        elif closing and letter == closing[-1]:
            closing.pop()
        elif letter in BRACKETS or letter in "'\"":
            closing.append(BRACKETS.get(letter, letter))
        elif letter == "," and not closing:
            yield part.strip()
            part = ""
            continue
        part += letter
    yield part.strip()


def short_names(names: Sequence[str]) -> list[str]:
    """Returns the last part of each name, or the whole name if that is not unique."""
    last = [re.split(r"[./]", name)[-1] for name in names]
    return [
        short if last.count(short) == 1 else name
        for short, name in zip(last, names, strict=True)
    ]


def _directory_names(grid: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns valid names that are unique even if a file system ignores case."""
    names: list[str] = []
    for point in grid:
        shorts = short_names(list(point))
        pairs = zip(shorts, point.values(), strict=True)
        plain = ",".join(
            f"{_sanitize(name)}={_sanitize(value)}" for name, value in pairs
        )
        plain = plain[:LONGEST_DIRECTORY]
        taken = {name.casefold() for name in names}
        numbered = (f"{plain},{number}" for number in itertools.count(2))
        names.append(
            next(
                name
                for name in itertools.chain([plain], numbered)
                if name.casefold() not in taken
            )
        )
    return names


def _sanitize(text: str) -> str:
    """Reduces a text to letters, digits and a few signs, up to the maximum length."""
    plain = re.sub(r"[^\w.+-]+", "-", text.strip("'\"@()[]{} ")).lstrip(".")
    return plain[:LONGEST].rstrip("-.") or "empty"
