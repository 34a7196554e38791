"""Functions that are equal if they have the same code and equal contents.

Optimizers are closures, and Python compares two closures by identity, so that equal
settings would be compiled anew for each run.
"""

import functools
import types
from collections.abc import Callable, Hashable, Mapping
from typing import Any

PLAIN = bool | int | float | complex | str | bytes | types.NoneType

LOCAL = "<locals>"
"""Part of the name of a function that another one defines anew at each call."""


class EqualFunction:
    """A function that is compared by its code and by what it holds.

    Numbers, texts, containers, partial functions, closures and other values with an
    equality of their own are compared by their contents, everything else by identity.

    Args:
      function: the function; what it holds must not change.

    Raises:
      TypeError: if it holds an object that can only be compared by identity.
    """

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self._contents = _contents(function, ())
        hash(self._contents)

    def __hash__(self) -> int:
        """Returns the hash of the code and the contents."""
        return hash(self._contents)

    def __eq__(self, other: object) -> bool:
        """Compares code and contents."""
        return isinstance(other, EqualFunction) and self._contents == other._contents


def _contents(value: Any, holders: tuple[int, ...]) -> Hashable:
    """Describes a value by plain values; `holders` are the objects that hold it."""
    if isinstance(value, PLAIN):
        return type(value), repr(value)  # 0 and 0.0, or 0.0 and -0.0, are not the same
    if id(value) in holders:  # a function that calls itself
        return "holder", holders.index(id(value))
    inner = functools.partial(_contents, holders=(*holders, id(value)))
    if isinstance(value, types.FunctionType) and LOCAL in value.__qualname__:
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        held = cells, value.__defaults__, value.__kwdefaults__
        # The function keeps its code alive, so no other code has this identity.
        return "function", id(value.__code__), inner(held)
    if isinstance(value, functools.partial):
        return "partial", inner((value.func, value.args, value.keywords))
    if isinstance(value, types.MethodType):
        return "method", inner((value.__func__, value.__self__))
    if isinstance(value, list | tuple):
        return type(value), *map(inner, value)
    if isinstance(value, Mapping):
        return type(value), *((inner(key), inner(item)) for key, item in value.items())
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return value
    if type(value).__eq__ is object.__eq__:
        raise TypeError(f"{value!r} is equal to itself only")
    return type(value), value
