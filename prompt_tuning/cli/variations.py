"""What tells the members of a sweep apart: the grid that `--vary` arguments span."""

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
    """One member.

    Attributes:
      name: of its directory, such as `seed=0,learning_rate=0.3`.
      bindings: its values, as gin reads them, by what they are bound to.
    """

    name: str
    bindings: Mapping[str, str]

    @property
    def lines(self) -> list[str]:
        """The bindings as lines of gin."""
        return [f"{name} = {value}" for name, value in self.bindings.items()]

    @property
    def varies(self) -> dict[str, str]:
        """The bindings under the shortest names that tell them apart."""
        names = short_names(list(self.bindings))
        return dict(zip(names, self.bindings.values(), strict=True))


def parse_variations(given: Sequence[str]) -> list[Variation]:
    """The members: every combination of what the arguments list, the last fastest.

    Args:
      given: each `NAME=VALUE,VALUE,...`, or `NAME,NAME=(VALUE,VALUE),...` where
        several values change together; commas inside brackets and quotes divide
        nothing.

    Raises:
      InputError: if an argument cannot be read, or two members would be the same.
    """
    axes = [_parse(argument) for argument in given]
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


def _parse(argument: str) -> list[dict[str, str]]:
    """The values of one argument, each with the names that it is given to."""
    left, equals, right = argument.partition("=")
    names, values = left.split(","), list(_split(right))
    if not equals or not all(map(str.strip, names)) or not all(values):
        raise InputError(f"--vary {argument} cannot be read; expected {SHAPE}")
    names = [name.strip() for name in names]
    if len(names) == 1:
        return [{names[0]: value} for value in values]
    points = []
    for value in values:
        parts = list(_split(value[1:-1])) if value[0] + value[-1] == "()" else []
        if len(parts) != len(names) or not all(parts):
            raise InputError(
                f"--vary {argument}: {value} is not one value for each of "
                f"{', '.join(names)}; expected {SHAPE}"
            )
        points.append(dict(zip(names, parts, strict=True)))
    return points


def _split(text: str) -> Iterator[str]:
    """What stands between the commas outside of brackets and quotes."""
    part, awaited = "", []
    for letter in text:
        if awaited and awaited[-1] in "'\"":
            if letter == awaited[-1] and not part.endswith("\\"):
                awaited.pop()
        elif awaited and letter == awaited[-1]:
            awaited.pop()
        elif letter in BRACKETS or letter in "'\"":
            awaited.append(BRACKETS.get(letter, letter))
        elif letter == "," and not awaited:
            yield part.strip()
            part = ""
            continue
        part += letter
    yield part.strip()


def short_names(names: Sequence[str]) -> list[str]:
    """The last parts of the names, or the whole where two end alike."""
    last = [re.split(r"[./]", name)[-1] for name in names]
    return [
        short if last.count(short) == 1 else name
        for short, name in zip(last, names, strict=True)
    ]


def _directory_names(grid: Sequence[Mapping[str, str]]) -> list[str]:
    """Names that any file system takes, also one that knows no capitals."""
    names: list[str] = []
    for point in grid:
        shorts = short_names(list(point))
        pairs = zip(shorts, point.values(), strict=True)
        plain = ",".join(f"{_plain(name)}={_plain(value)}" for name, value in pairs)
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


def _plain(text: str) -> str:
    """Letters, digits and a few signs of a text, as much of it as a name can take."""
    plain = re.sub(r"[^\w.+-]+", "-", text.strip("'\"@()[]{} ")).lstrip(".")
    return plain[:LONGEST].rstrip("-.") or "empty"
