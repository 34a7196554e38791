"""One option of the command line that sets a value of a run."""

import dataclasses
from typing import Any

MODEL, DATA, METHOD = "model", "data", "method"
TRAINING, EVALUATION, OUTPUT = "training", "evaluation", "output"
GROUPS = (MODEL, DATA, METHOD, TRAINING, EVALUATION, OUTPUT)
"""Groups of options, in the order of help."""


@dataclasses.dataclass(frozen=True)
class FlatOption:
    """One option.

    Attributes:
      name: name without dashes.
      help: description, without the default.
      setting: parameter that it sets, as configs write it; empty if it depends on the
        method. The option has its type, its default and its literal choices, which
        `config.options` adds.
      kind: `str`, `list` for several texts, `dict` for an object of JSON, `bool` for a
        flag, or for a number a type with a range, such as `PositiveInteger`; None for
        the type of its setting.
      item: type of the values of a list.
      macro: name that shipped configs use for the value, if any.
      default: default that help shows, or None; a text where it depends on other
        options.
      choices: accepted values; empty for all.
      metavar: name of the value in help.
      group: one of `GROUPS`, which `in_group` sets.
    """

    name: str
    help: str
    setting: str = ""
    kind: Any = None
    item: Any = str
    macro: str = ""
    default: Any = None
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    group: str = ""

    @property
    def is_number(self) -> bool:
        """Whether the value is a number."""
        return self.kind not in (None, str, list, dict, bool)

    @property
    def flag(self) -> str:
        """The option as it is typed."""
        return f"--{self.name}"


def in_group(group: str, *options: FlatOption) -> tuple[FlatOption, ...]:
    """Returns options in a group of help."""
    return tuple(dataclasses.replace(option, group=group) for option in options)
