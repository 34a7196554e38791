"""Settings as people give them: plain values whose types nobody has checked yet."""

import dataclasses
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from prompt_tuning.core.errors import InputError

PLAIN = (bool, int, float, str, types.NoneType)


def check_fields(settings: Any) -> None:
    """Holds the fields of a dataclass against their types.

    An integer may stand for a float. Fields that are neither plain values nor
    dataclasses are left alone.

    Raises:
      InputError: for the first value of another type.
    """
    name = type(settings).__name__
    for field, hint in get_type_hints(type(settings)).items():
        found, accepted = getattr(settings, field), _members(hint)
        if not all(kind in PLAIN or _is_settings(kind) for kind in accepted):
            continue
        if float in accepted:
            accepted = (*accepted, int)
        built = tuple(kind for kind in accepted if _is_settings(kind))
        if type(found) in accepted or isinstance(found, built):
            continue
        wanted = [f"@{k.__name__}()" if k in built else k.__name__ for k in accepted]
        raise InputError(
            f"{name}.{field} is {found!r}, a {type(found).__name__}; expected "
            f"{' or '.join(wanted).replace('NoneType', 'None')}"
        )


def _is_settings(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _members(hint: Any) -> tuple[Any, ...]:
    """The types that a hint allows; those of a literal's values for a literal."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return tuple(kind for part in get_args(hint) for kind in _members(part))
    if origin is Literal:
        return tuple({type(value) for value in get_args(hint)})
    return (hint,)
