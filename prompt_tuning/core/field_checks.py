"""Type checks of settings that come from users."""

import dataclasses
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from prompt_tuning.core.errors import InputError

PLAIN = (bool, int, float, str, types.NoneType)


def check_fields(settings: Any) -> None:
    """Checks the fields of a dataclass against their types.

    Integers are accepted as floats. Fields that are neither plain values nor
    dataclasses are not checked.

    Raises:
      InputError: for the first value of a wrong type.
    """
    name = type(settings).__name__
    for field, hint in get_type_hints(type(settings)).items():
        value, accepted = getattr(settings, field), _members(hint)
        if not all(kind in PLAIN or _is_settings(kind) for kind in accepted):
            continue
        if float in accepted:
            accepted = (*accepted, int)
        nested = tuple(kind for kind in accepted if _is_settings(kind))
        if type(value) in accepted or isinstance(value, nested):
            continue
        names = [f"@{k.__name__}()" if k in nested else k.__name__ for k in accepted]
        raise InputError(
            f"{name}.{field} is {value!r}, a {type(value).__name__}; expected "
            f"{' or '.join(names).replace('NoneType', 'None')}"
        )


def _is_settings(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _members(hint: Any) -> tuple[Any, ...]:
    """Returns the types that a hint allows; for a literal the types of its values."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return tuple(kind for part in get_args(hint) for kind in _members(part))
    if origin is Literal:
        return tuple({type(value) for value in get_args(hint)})
    return (hint,)
