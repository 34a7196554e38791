"""The options of the command line, with the types and defaults of what they set."""

import ast
import dataclasses
from collections.abc import Mapping
from types import NoneType
from typing import Literal, get_args, get_origin

from prompt_tuning.config import flat_options
from prompt_tuning.config.factory_outlines import outlined_parameter
from prompt_tuning.config.flat_option import FlatOption


def _completed(option: FlatOption) -> FlatOption:
    """Returns an option with the type, choices and default of its setting."""
    owner, _, name = option.setting.rpartition(".")
    if not owner:
        return option
    parameter = outlined_parameter(owner.rpartition("/")[2], name)
    default, hint = parameter.default, parameter.annotation
    if NoneType in get_args(hint):
        hint = get_args(hint)[0]
    is_choice = get_origin(hint) is Literal
    kind = str if is_choice or option.choices else hint
    has_default = default is not parameter.empty and not isinstance(default, ast.expr)
    return dataclasses.replace(
        option,
        kind=option.kind or kind,
        default=default if option.default is None and has_default else option.default,
        choices=get_args(hint) if is_choice else option.choices,
    )


TABLE = tuple(map(_completed, flat_options.TABLE))
OPTIONS: Mapping[str, FlatOption] = {option.name: option for option in TABLE}
