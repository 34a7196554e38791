"""The values of an operative config, as text, without gin."""

import ast
import re
from collections.abc import Iterable, Mapping
from typing import Any

CONFIG_FILE = "config.gin"
"""The config in a run directory."""
IDENTITY_FILE = "run.json"
"""The record of a run in its directory."""
STOPPED_FILE = "stopped.json"
"""Why a run stopped before its last step, and where."""


def config_lines(config: str) -> list[str]:
    """Returns a config's bindings, one a line, without comments."""
    # gin wraps long values; continuation lines are indented further.
    # Without the first condition, a long run of spaces would take quadratic time.
    whole = re.sub(r"(?<![ \t])[ \t]*\\?\n[ \t]+", " ", config)
    return [line for line in whole.splitlines() if line.strip() and line[0] != "#"]


def config_values(config: str) -> dict[str, str]:
    """Returns the texts of values by name; the name of a macro has no dot."""
    parts = (line.partition(" = ") for line in config_lines(config))
    return {name: value for name, _, value in parts}


def resolved(values: Mapping[str, str], name: str) -> str:
    """Returns the text of a value, or of the macro that it refers to."""
    value = values.get(name, "")
    return values.get(value[1:], value) if value.startswith("%") else value


def literal(text: str, default: Any = None) -> Any:
    """Parses a number, a text, or a list of them; the default for anything else."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return default


def factory_of(name: str) -> str:
    """Returns the scope and factory of a setting; the empty text for a macro."""
    return name.rpartition(".")[0]


def macros_in(values: Iterable[str]) -> set[str]:
    """Returns the names of the macros that values use."""
    return {name for value in values for name in re.findall(r"%([\w./]+)", value)}
