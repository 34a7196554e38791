"""Type and range checks of settings from users.

A type such as `core.number_ranges.PositiveInteger` states a number's range.
"""

import collections.abc
import dataclasses
import functools
import inspect
import math
import os
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar, Union

from prompt_tuning.core.errors import InputError, kind_of, shown
from prompt_tuning.core.number_ranges import NumberRange, as_number
from prompt_tuning.core.typed_json import MAXIMUM_INTEGER

PLAIN = (bool, int, float, str, types.NoneType)
CONTAINERS = (list, tuple, collections.abc.Sequence)
_FUNCTION = collections.abc.Callable
Function = TypeVar("Function", bound=Callable[..., Any])


def check_fields(settings: Any, prefix: str | None = None) -> None:
    """Checks the arguments of a dataclass against their types; see `check_value`.

    Messages write `prefix` before a field's name: by default the class and a dot.

    Raises:
      InputError: for the first value with a wrong type or out of range.
    """
    prefix = f"{type(settings).__name__}." if prefix is None else prefix
    hints = typing.get_type_hints(type(settings), include_extras=True)
    for field in dataclasses.fields(settings):
        if field.init:
            value = getattr(settings, field.name)
            check_value(f"{prefix}{field.name}", value, hints[field.name])


def checks_arguments(function: Function) -> Function:
    """Makes a function check its arguments against their types; see `check_value`."""

    @functools.wraps(function)
    def checked(*arguments: Any, **parameters: Any) -> Any:
        bound = signature.bind(*arguments, **parameters).arguments
        hints = typing.get_type_hints(function, include_extras=True)
        for name, value in bound.items():
            check_value(f"{function.__name__}.{name}", value, hints[name])
        return function(*arguments, **parameters)

    signature = inspect.signature(function)
    return checked  # pyright: ignore[reportReturnType]


def check_value(label: str, value: Any, hint: Any) -> None:
    """Checks a value against the annotation of its parameter.

    Integers are accepted as floats, and lists as tuples. Integers must fit in 32 bits,
    floats must be finite, and both must be in the range that the type states. Only
    plain types, dataclasses, functions and containers are checked.

    Raises:
      InputError: if the value has another type, is out of range, or is none of the
        texts that the parameter allows.
    """
    _check_numbers(label, value)
    choices = _choices(hint)
    if choices and isinstance(value, str) and value not in choices:
        names = ", ".join(map(repr, choices))
        raise InputError(f"{label} is {shown(value)}, expected one of {names}")
    if _accepts(hint, value):
        _check_ranges(label, value, hint)
        return
    expected = _name(hint)
    if type(value) in PLAIN or isinstance(value, list | tuple | dict):
        text = f"is {shown(value)}, {kind_of(value)}"
    else:
        a_list = "not a list but " if expected.startswith("a list") else ""
        text = f"is {a_list}{kind_of(value)}"
    raise InputError(f"{label} {text}; expected {expected}")


def _check_ranges(label: str, value: Any, hint: Any) -> None:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        for part in inner:
            if as_number(value) is not None or _accepts(part, value):
                _check_ranges(label, value, part)
    elif origin is Annotated:
        number = as_number(value)
        for bounds in inner[1:]:
            if isinstance(bounds, NumberRange) and number is not None:
                check_range(label, number, bounds)
    elif origin is collections.abc.Mapping and isinstance(value, Mapping):
        for key, item in value.items():
            _check_ranges(f"a key of {label}", key, inner[0])
            _check_ranges(f"{label} of {shown(key)}", item, inner[1])
    elif origin in CONTAINERS and isinstance(value, list | tuple):
        repeated = len(inner) == 1 or inner[1:] == (...,)
        hints = (inner[0],) * len(value) if repeated else inner
        for item, item_hint in zip(value, hints, strict=True):
            _check_ranges(f"a number of {label}", item, item_hint)


def check_range(label: str, number: float | int, bounds: NumberRange) -> None:
    """Checks that a number is in a range.

    Raises:
      InputError: if it is not.
    """
    if number not in bounds:
        found = f"{number:,}" if type(number) is int else shown(number)
        raise InputError(f"{label} is {found}, expected {bounds}")


def _accepts(hint: Any, value: Any) -> bool:
    """Tests whether a value has a type; True for types that are not checked."""
    kinds = _members(hint)
    if _takes_schedule(kinds) and not _is_plain(value):
        return True  # a function, or a number of NumPy or JAX
    return any(_is_of_kind(kind, value) for kind in kinds)


def _takes_schedule(kinds: tuple[Any, ...]) -> bool:
    """Tests whether a parameter is a number or a function of the step."""
    return float in kinds and any(
        typing.get_origin(kind) is _FUNCTION for kind in kinds
    )


def _is_of_kind(kind: Any, value: Any) -> bool:
    if kind is Any:
        return True
    if kind in PLAIN:
        return type(value) is kind or (kind is float and type(value) is int)
    if _is_settings(kind):
        return isinstance(value, kind)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Callable or origin is _FUNCTION:
        return callable(value)
    if origin is collections.abc.Mapping:
        return isinstance(value, Mapping) and all(
            _is_item(inner[0], key) and _is_item(inner[1], item)
            for key, item in value.items()
        )
    if origin in CONTAINERS:
        return _is_list_of(inner, value)
    return not isinstance(kind, type) or not _is_plain(value) or isinstance(value, kind)


def _is_list_of(inner: tuple[Any, ...], value: Any) -> bool:
    """Tests whether a value is a list or tuple of a container's item types."""
    if not isinstance(value, collections.abc.Sequence) or isinstance(value, str):
        return False
    if len(inner) == 1 or inner[1:] == (...,):
        inner = (inner[0],) * len(value)
    return len(inner) == len(value) and all(map(_is_item, inner, value))


def _is_item(hint: Any, value: Any) -> bool:
    """Tests whether an item has a type; from Python, paths count as texts."""
    return _accepts(hint, value) or (
        str in _members(hint) and isinstance(value, os.PathLike)
    )


def _is_plain(value: Any) -> bool:
    return type(value) in PLAIN or isinstance(value, list | tuple | dict)


def _check_numbers(label: str, value: Any) -> None:
    for number in _numbers(value):
        if type(number) is int and abs(number) > MAXIMUM_INTEGER:
            raise InputError(
                f"{label} is {shown(number)}, expected an integer from "
                f"{-MAXIMUM_INTEGER:,} to {MAXIMUM_INTEGER:,}"
            )
        if type(number) is float and not math.isfinite(number):
            raise InputError(f"{label} is {number}, expected a finite number")


def _numbers(value: Any) -> Iterator[int | float]:
    """Yields the numbers in a plain value."""
    if type(value) in (int, float):
        yield value
    elif type(value) in (list, tuple, dict):
        for item in value.values() if type(value) is dict else value:
            yield from _numbers(item)


def _is_settings(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _name(hint: Any) -> str:
    kinds = _members(hint)
    if _takes_schedule(kinds):
        return "a number or a schedule such as @warmup_linear_decay()"
    names = [_name_of_kind(kind) for kind in kinds]
    if float in kinds and int not in kinds:
        names.insert(names.index("float") + 1, "int")
    return " or ".join(dict.fromkeys(names))


def _name_of_kind(kind: Any) -> str:
    if kind is types.NoneType:
        return "None"
    if _is_settings(kind):
        return f"@{kind.__name__}()"
    origin = typing.get_origin(kind)
    inner: tuple[Any, ...] = typing.get_args(kind)
    if origin is _FUNCTION:
        return "a factory, such as @name"
    if origin is collections.abc.Mapping:
        return f"a dict of {' to '.join(map(_name, inner))}"
    if origin in CONTAINERS:
        item, *rest = inner
        if rest and rest[0] is not ...:
            return f"({', '.join(map(_name, inner))})"
        return f"a list of {'strings' if item is str else _name(item)}"
    return getattr(kind, "__name__", str(kind))


def _choices(hint: Any) -> tuple[str, ...]:
    """Returns the texts that a hint allows; empty if it allows any."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        parts = typing.get_args(hint)
        return () if str in parts else sum(map(_choices, parts), ())
    if typing.get_origin(hint) is Literal:
        return tuple(name for name in typing.get_args(hint) if isinstance(name, str))
    return ()


def _members(hint: Any) -> tuple[Any, ...]:
    """Returns the types that a hint allows; for a literal, the types of its values."""
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return tuple(kind for part in typing.get_args(hint) for kind in _members(part))
    if origin is Annotated:
        return _members(typing.get_args(hint)[0])
    if origin is Literal:
        return tuple({type(value) for value in typing.get_args(hint)})
    return (hint,)
