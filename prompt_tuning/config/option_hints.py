"""Names the option of the command line that sets a parameter, for messages."""

import shlex
from typing import Any

from prompt_tuning.config.config_table import settings_of
from prompt_tuning.config.flat_options import TABLE
from prompt_tuning.core.setting_hints import as_binding

_BY_SETTING = {option.setting: option for option in TABLE if option.setting}


def as_option(setting: str, value: Any) -> str:
    """Returns the option that sets a parameter, and the binding that works everywhere.

    A parameter without an option has only the binding, and an argument of a command
    only the option; see `speak_with`.
    """
    if "." not in setting:
        return f"--{setting}" if value is True else f"--{setting} {value}"
    binding = as_binding(setting, value)
    of_macros = (x for x in TABLE if setting in settings_of(x.macro))
    option = _BY_SETTING.get(setting) or next(of_macros, None)
    if option is None:
        return binding
    if isinstance(value, bool):
        return f"{option.flag} (or {binding})"
    values = value if isinstance(value, list | tuple) else [value]
    words = [shlex.quote(str(item)) for item in values]
    return f"{' '.join([option.flag, *words])} (or {binding})"
