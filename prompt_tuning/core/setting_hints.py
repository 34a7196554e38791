"""Names what to type on the command line, for messages about settings."""

import json
import shlex
from typing import Any

from prompt_tuning.core.flat_options import TABLE

_BY_SETTING = {option.setting: option for option in TABLE if option.setting}


class Placeholder(str):
    """Stands for a value that is not text, in what `how_to_set` returns."""


NUMBER = Placeholder("NUMBER")


def how_to_set(setting: str, value: Any) -> str:
    """Returns what to type on the command line to set a parameter.

    Where there is an option, it is named with the binding that works everywhere.

    Args:
      setting: parameter as configs write it, such as "DataSource.on_too_long".
      value: its value; words in capitals stand for the user's choice.
    """
    text = value if isinstance(value, Placeholder) else _as_gin(value)
    binding = f"--gin.{setting}={shlex.quote(text)}"
    option = _BY_SETTING.get(setting)
    if option is None:
        return binding
    values = value if isinstance(value, list | tuple) else [value]
    words = [] if option.kind is bool else [shlex.quote(str(item)) for item in values]
    return f"{' '.join([option.flag, *words])} (or {binding})"


def _as_gin(value: Any) -> str:
    """Writes a value as gin reads it, with double quotes, which the shell leaves."""
    plain = isinstance(value, str | list | tuple | dict)
    return json.dumps(value, ensure_ascii=False) if plain else repr(value)
