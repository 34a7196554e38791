"""The values that the last config set, and the bindings that have no effect.

gin keeps them until it reads the next config.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import gin
from gin import config as gin_config

from prompt_tuning.config.deferred_factories import factory_signature
from prompt_tuning.core.errors import InputError, shortened
from prompt_tuning.core.private_parts import private_part

Values = dict[tuple[str, str], dict[str, Any]]
"""Values by scope and factory, and by parameter."""


def bound_config() -> str:
    """Returns the values that files and bindings set for the run read last."""
    return gin.config_str()


def operative_config() -> str:
    """Returns all values in use, with defaults, as a gin file that repeats the run."""
    return gin.operative_config_str()


def complete_config() -> str:
    """Returns the operative config of the run, with the factories not called yet.

    gin's operative config has only the factories that were called. Prompts and their
    initializers are called once the model is open, so this adds every factory that the
    config refers to, with its bindings and defaults.
    """
    called = dict(_operative())
    _operative().update(complete_values())
    try:
        return operative_config()
    finally:
        _operative().clear()
        _operative().update(called)


def complete_values() -> Values:
    """Returns the values of all factories that the run refers to.

    They are in `complete_config`, here by scope and factory. The config has to be
    parsed, and its factories need not have been called.
    """
    complete: Values = {key: dict(values) for key, values in _operative().items()}
    pending: list[tuple[str, Any]] = [
        ("", gin_config.ConfigurableReference("Run", True))
    ]
    for (scope, _), values in complete.items():
        pending += _references(scope, values)
    while pending:
        outer, reference = pending.pop(0)
        scope = "/".join(reference.scopes) or outer * reference.evaluate
        key = scope, reference.configurable.selector
        if key not in complete:
            values = _parameters_in_use(*key, reference.configurable)
            complete[key] = values
            pending += _references(scope, values)
    return complete


def _operative() -> Values:
    return private_part("gin.config._OPERATIVE_CONFIG")


def _references(scope: str, values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(scope, x) for x in gin_config.iterate_references(dict(values))]


def _parameters_in_use(scope: str, selector: str, configurable: Any) -> dict[str, Any]:
    """Returns the defaults of a factory, overridden by its bindings in a scope."""
    signature = factory_signature(configurable.wrapped)
    values = {
        name: parameter.default
        for name, parameter in signature.parameters.items()
        if parameter.default is not parameter.empty
    }
    # A scope also has the bindings of the scopes around it.
    parts = scope.split("/") if scope else []
    for depth in range(len(parts) + 1):
        outer = "/".join(parts[:depth])
        values |= private_part("gin.config._CONFIG").get((outer, selector), {})
    return values


def unused_bindings(bindings: Sequence[str]) -> dict[str, str]:
    """Returns the bindings that have no effect on the run read last, and why."""
    used = complete_values()
    unused = {}
    for binding in bindings:
        key = binding.partition("=")[0].strip()
        if "." not in key:
            continue  # a macro
        parsed = gin_config.ParsedBindingKey.parse(key)
        inside = tuple(parsed.scope.split("/")) if parsed.scope else ()
        if not any(
            selector == parsed.complete_selector and _is_within(scope, inside)
            for scope, selector in used
        ):
            unused[key] = _effective(key.rpartition(".")[0], parsed.arg_name, used)
    return unused


def _is_within(scope: str, outer: tuple[str, ...]) -> bool:
    return tuple(scope.split("/") if scope else ())[: len(outer)] == outer


def _effective(name: str, parameter: str, used: Mapping[tuple[str, str], Any]) -> str:
    """Explains why a binding has no effect, and which one would have it."""
    others = [
        f"--gin.{scope}{'/' * bool(scope)}{selector.rpartition('.')[2]}.{parameter}="
        f"{values[parameter]!r}"
        for (scope, selector), values in used.items()
        if parameter in values
    ]
    hint = f"; in effect: {', '.join(others)}" if others else ""
    return f"the run does not use {shortened(name)}{hint}"


def check_used(unused: Mapping[str, str]) -> None:
    """Refuses bindings without effect; see `unused_bindings`."""
    for key, reason in unused.items():
        raise InputError(f"--gin.{shortened(key)} has no effect: {reason}")
