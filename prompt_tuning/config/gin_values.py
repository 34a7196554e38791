"""Checks of the values that a parsed config binds, before any factory is called."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from gin import config as gin_config

from prompt_tuning.config.parameter_checks import check_parameter
from prompt_tuning.core.errors import InputError, shortened
from prompt_tuning.core.field_checks import PLAIN
from prompt_tuning.core.private_parts import private_part

MAXIMUM_VALUES = 500_000
"""Maximum number of values of a config once its macros are replaced."""
MAXIMUM_REFERENCES = 10_000
"""Maximum number of references and macros that are followed."""
MAXIMUM_REFERENCE_DEPTH = 40
"""Maximum number of references that lead from a binding to a value."""

Bindings = Mapping[tuple[str, str], Mapping[str, Any]]


def check_values(factories: Mapping[str, Callable[..., Any]]) -> None:
    """Checks the types of all bound values, and that no reference is circular.

    Values that a factory makes are not known yet and not checked.
    """
    bindings: Bindings = private_part("gin.config._CONFIG")
    expansion = _Expansion(bindings)
    for (scope, selector), parameters in bindings.items():
        factory = factories.get(selector.rpartition(".")[2])
        for name, value in parameters.items():
            expanded = expansion.value(value, scope, 0)
            if factory is not None and not _has_unknown(expanded):
                check_parameter(factory, name, expanded)


class _Unknown:
    """Stands for what a factory will make."""


class _Expansion:
    """Replaces references in values as gin will do it, and counts the values."""

    def __init__(self, bindings: Bindings):
        self._bindings = bindings
        self._values = self._references = 0

    def value(self, value: Any, scope: str, depth: int) -> Any:
        """Returns a value with its macros replaced, and `_Unknown` for made objects."""
        if isinstance(value, gin_config.ConfigurableReference):
            return self._reference(value, scope, depth + 1)
        if isinstance(value, list | tuple):
            self._add(len(value))
            return type(value)(self._items(value, scope, depth))
        if isinstance(value, dict):
            self._add(2 * len(value))
            keys = self._items(value, scope, depth)
            items = self._items(value.values(), scope, depth)
            return _Unknown() if _has_unknown(keys) else _dictionary(keys, items)
        return value

    def _items(self, values: Iterable[Any], scope: str, depth: int) -> list[Any]:
        return [
            value if type(value) in PLAIN else self.value(value, scope, depth)
            for value in values
        ]

    def _add(self, values: int) -> None:
        self._values += values
        if self._values > MAXIMUM_VALUES:
            raise InputError(
                f"the config has {self._values:,} values or more once its macros are "
                f"replaced, expected at most {MAXIMUM_VALUES:,}"
            )

    def _reference(
        self, reference: gin_config.ConfigurableReference, scope: str, depth: int
    ) -> Any:
        name = shortened(reference.scoped_selector.removesuffix("/gin.macro"))
        self._references += 1
        if depth > MAXIMUM_REFERENCE_DEPTH:
            raise InputError(
                f"the config refers to {name} in a circle, or through {depth} "
                f"references, expected at most {MAXIMUM_REFERENCE_DEPTH}"
            )
        if self._references > MAXIMUM_REFERENCES:
            raise InputError(
                f"the config follows {self._references:,} references or more, expected "
                f"at most {MAXIMUM_REFERENCES:,}"
            )
        scope = "/".join(reference.scopes) or scope
        configurable: Any = reference.configurable
        selector = configurable.selector
        inner = {
            parameter: self.value(value, scope, depth)
            for parameter, value in self._parameters(scope, selector)
        }
        if configurable.wrapped is gin_config.macro:
            return inner.get("value", _Unknown())
        return _Unknown()

    def _parameters(self, scope: str, selector: str) -> Iterator[tuple[str, Any]]:
        """Yields the bindings of a factory in a scope and the scopes around it."""
        parts = scope.split("/") if scope else []
        values: dict[str, Any] = {}
        for depth in range(len(parts) + 1):
            values |= self._bindings.get(("/".join(parts[:depth]), selector), {})
        yield from values.items()


def _dictionary(keys: list[Any], items: list[Any]) -> Any:
    try:
        return dict(zip(keys, items, strict=True))
    except TypeError:
        raise InputError("a key of a dict is a list or a dict") from None


def _has_unknown(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_unknown, value))
    if isinstance(value, dict):
        return any(map(_has_unknown, value.values()))
    return isinstance(value, _Unknown)
