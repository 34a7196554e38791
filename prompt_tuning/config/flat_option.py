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
      group: one of `GROUPS`.
      help: description, without the default.
      setting: parameter that it sets, as configs write it; empty if it depends on the
        method. The option has its type, its default and its literal choices, which
        `config.options` adds.
      kind: `str`, `list` for several texts, `dict` for an object of JSON, `bool` for a
        flag, or for a number a type with a range, such as `PositiveInteger`; None for
        the type of its setting.
      item: type of each of several values.
      macro: name that shipped configs use for the value, if any.
      default: default that help shows; None if there is none, and a text where the
        default depends on other options.
      choices: values that are accepted; empty for all.
      metavar: name of the value in help.
    """

    name: str
    group: str
    help: str
    setting: str = ""
    kind: Any = None
    item: Any = str
    macro: str = ""
    default: Any = None
    choices: tuple[str, ...] = ()
    metavar: str | None = None

    @property
    def is_number(self) -> bool:
        """Whether the value is a number."""
        return self.kind not in (None, str, list, dict, bool)

    @property
    def flag(self) -> str:
        """The option as it is typed."""
        return f"--{self.name}"
