"""Names the option of the command line that sets a parameter, for messages."""

import shlex
from typing import Any

from prompt_tuning.config.flat_options import TABLE
from prompt_tuning.core.setting_hints import as_binding

_BY_SETTING = {option.setting: option for option in TABLE if option.setting}


def as_option(setting: str, value: Any) -> str:
    """Returns the option that sets a parameter, and the binding that works everywhere.

    A parameter without an option has only the binding; see `speak_with`.
    """
    binding = as_binding(setting, value)
    option = _BY_SETTING.get(setting)
    if option is None:
        return binding
    if isinstance(value, bool):
        return f"{option.flag} (or {binding})"
    values = value if isinstance(value, list | tuple) else [value]
    words = [shlex.quote(str(item)) for item in values]
    return f"{' '.join([option.flag, *words])} (or {binding})"
