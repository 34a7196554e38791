"""Names what to type on the command line, for messages about settings."""

import contextlib
import contextvars
import json
import shlex
from collections.abc import Iterator
from typing import Any

from prompt_tuning.core.flat_options import TABLE

_BY_SETTING = {option.setting: option for option in TABLE if option.setting}


class Placeholder(str):
    """Stands for a value that is not text, in what `how_to_set` returns."""


NUMBER = Placeholder("NUMBER")


_in_python = contextvars.ContextVar("_in_python", default=False)


@contextlib.contextmanager
def python_hints() -> Iterator[None]:
    """Lets messages within the block name arguments of Python instead of options.

    It is also a decorator of functions that Python calls.
    """
    token = _in_python.set(True)
    try:
        yield
    finally:
        _in_python.reset(token)


def how_to_set(setting: str, value: Any) -> str:
    """Returns what to type on the command line to set a parameter.

    Where there is an option, it is named with the binding that works everywhere. Within
    `python_hints` it is an argument.

    Args:
      setting: parameter as configs write it, such as "DataSource.on_too_long".
      value: its value; words in capitals stand for the user's choice.
    """
    if _in_python.get():
        return _as_argument(setting, value)
    text = value if isinstance(value, Placeholder) else _as_gin(value)
    binding = f"--gin.{setting}={shlex.quote(text)}"
    option = _BY_SETTING.get(setting)
    if option is None:
        return binding
    if isinstance(value, bool):
        return f"{option.flag} (or {binding})"
    values = value if isinstance(value, list | tuple) else [value]
    words = [shlex.quote(str(item)) for item in values]
    return f"{' '.join([option.flag, *words])} (or {binding})"


def _as_argument(setting: str, value: Any) -> str:
    """Returns the argument of `tune`, or of what it is given, that sets a parameter."""
    scope, _, name = setting.rpartition("/")
    owner, _, field = name.rpartition(".")
    argument = f"{field}={value if isinstance(value, Placeholder) else repr(value)}"
    if scope == "evaluation":
        return f"evaluation=DataSource(files=..., {argument})"
    if owner == "Pretrained":
        return f"load(..., {argument})"
    return argument if owner in ("DataSource", "Run") else f"{owner}({argument})"


def _as_gin(value: Any) -> str:
    """Writes a value as gin reads it, with double quotes, which the shell leaves."""
    plain = isinstance(value, str | list | tuple | dict)
    return json.dumps(value, ensure_ascii=False) if plain else repr(value)
