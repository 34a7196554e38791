"""Values outside the meaning of a setting, made from its annotated type."""

import collections.abc
import dataclasses
import math
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from prompt_tuning.core.number_ranges import NumberRange

NO_CHOICE = "no such choice"


def has_unranged(hint: Any) -> bool:
    """Returns whether a type has a number whose range it does not state."""
    if get_origin(hint) is Annotated:
        return not any(isinstance(x, NumberRange) for x in hint.__metadata__)
    if get_origin(hint) is collections.abc.Callable:
        return False
    return hint in (int, float) or any(map(has_unranged, _inner(hint)))


def outside(hint: Any) -> list[Any]:
    """Returns values of the right form that no setting of this type can have."""
    kinds = _parts(hint)
    return [
        value
        for kind in kinds
        for value in _of_kind(kind)
        if type(value) not in kinds or type(value) not in (bool, str)
    ]


def _of_kind(kind: Any) -> Iterator[Any]:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        yield from _numbers(kind.__metadata__[0], whole=inner[0] is int)
    elif kind is bool or origin is Literal:
        yield NO_CHOICE
    elif kind is str or (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        yield True
    elif origin is collections.abc.Mapping:
        keys = {str: "1"}.get(inner[0], 1)
        yield from ({keys: item} for item in outside(inner[1]))
    elif origin in (tuple, collections.abc.Sequence):
        for item in outside(inner[0]):
            yield (item,) if inner[1:] in ((), (...,)) else (item,) * len(inner)


def _numbers(bounds: NumberRange, whole: bool) -> Iterator[float]:
    """Yields numbers at the edges of a range that are not in it."""
    if not math.isinf(bounds.minimum):
        yield bounds.minimum if bounds.above else bounds.minimum - 1
        if bounds.minimum > 0 and 0 not in bounds.also:
            yield 0
    if not math.isinf(bounds.maximum):
        yield bounds.maximum if bounds.below else bounds.maximum + 1
    yield from (2**31, -(2**31)) if whole else (math.nan, math.inf, -math.inf)


def _parts(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(kind for part in get_args(hint) for kind in _parts(part))
    return (hint,)


def _inner(hint: Any) -> tuple[Any, ...]:
    return tuple(x for x in get_args(hint) if not isinstance(x, str | bool | list))
