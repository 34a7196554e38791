"""Settings as people give them: plain values whose types nobody has checked yet."""

import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from prompt_tuning.errors import InputError

PLAIN = (bool, int, float, str, types.NoneType)


def check_fields(settings: Any) -> None:
    """Holds the fields of a dataclass that are plain values against their types.

    An integer may stand for a float. Fields of any other type are left alone.

    Raises:
      InputError: for the first value of another type.
    """
    name = type(settings).__name__
    for field, hint in get_type_hints(type(settings)).items():
        found, accepted = getattr(settings, field), _members(hint)
        if not all(kind in PLAIN for kind in accepted):
            continue
        if float in accepted:
            accepted = (*accepted, int)
        if type(found) not in accepted:
            wanted = " or ".join(kind.__name__ for kind in accepted)
            raise InputError(
                f"{name}.{field} is {found!r}, a {type(found).__name__}; expected "
                f"{wanted.replace('NoneType', 'None')}"
            )


def _members(hint: Any) -> tuple[Any, ...]:
    """The types that a hint allows; those of a literal's values for a literal."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return tuple(kind for part in get_args(hint) for kind in _members(part))
    if origin is Literal:
        return tuple({type(value) for value in get_args(hint)})
    return (hint,)
