"""Tells in a message how to set a parameter, in the reader's own terms.

Code that finds a wrong setting knows its name, e.g. "DataSource.on_too_long". How to
set it depends on where the message is shown: in Python by an argument, on the command
line by an option. The command line registers its wording with `speak_with`.
"""

import json
import shlex
from collections.abc import Callable
from typing import Any

Words = Callable[[str, Any], str]
"""Returns how to give a setting a value, as a user would write it."""


class Placeholder(str):
    """Stands for a value other than text in the result of `how_to_set`."""


NUMBER, FILE = Placeholder("NUMBER"), Placeholder("FILE")


def as_binding(setting: str, value: Any) -> str:
    """Returns the option that binds any parameter, e.g. "--gin.Run.steps=5"."""
    text = value if isinstance(value, Placeholder) else _as_gin(value)
    return f"--gin.{setting}={shlex.quote(text)}"


def as_argument(setting: str, value: Any) -> str:
    """Returns the argument of `tune`, or of one of its arguments, for a parameter."""
    scope, _, name = setting.rpartition("/")
    owner, _, field = name.rpartition(".")
    argument = f"{field}={value if isinstance(value, Placeholder) else repr(value)}"
    if scope == "evaluation":
        return f"evaluation=DataSource(files=..., {argument})"
    if owner == "Pretrained":
        return f"load(..., {argument})"
    return argument if owner in ("", "DataSource", "Run") else f"{owner}({argument})"


_words: list[Words] = [as_argument]


def speak_with(words: Words) -> None:
    """Makes all messages of this process use these words."""
    _words[:] = [words]


def how_to_set(setting: str, value: Any) -> str:
    """Returns what the reader of a message should type to set a parameter.

    Args:
      setting: parameter as configs write it, e.g. "DataSource.on_too_long"; a name
        without a dot is an argument of the command or function, e.g. "force".
      value: its value; capital letters stand for the user's choice.
    """
    return _words[0](setting, value)


def _as_gin(value: Any) -> str:
    """Writes a value as gin reads it, with double quotes, which shells keep."""
    plain = isinstance(value, str | list | tuple | dict)
    return json.dumps(value, ensure_ascii=False) if plain else repr(value)
