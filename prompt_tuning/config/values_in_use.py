"""The values that the run read last uses, and the bindings that it does not use.

gin keeps them until it reads the next config.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import gin
from gin import config as gin_config

from prompt_tuning.core.errors import InputError, shortened


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
    return gin_config._config_str(_complete())


def _complete() -> dict[tuple[str, str], dict[str, Any]]:
    """Returns the values of `complete_config` by scope and factory."""
    complete = {key: dict(value) for key, value in _operative().items()}
    pending = list(gin_config.iterate_references(complete))
    while pending:
        reference = pending.pop()
        key = reference.config_key
        if key not in complete:
            complete[key] = _parameters_in_use(reference)
            pending += gin_config.iterate_references(complete[key])
    return complete


def _operative() -> dict[tuple[str, str], dict[str, Any]]:
    return gin_config._OPERATIVE_CONFIG


def _parameters_in_use(reference: Any) -> dict[str, Any]:
    """Returns the defaults of a reference's factory, overridden by its bindings."""
    scope, selector = reference.config_key
    configurable = reference.configurable
    values = dict(
        gin_config._get_default_configurable_parameter_values(
            configurable.wrapped, configurable.allowlist, configurable.denylist
        )
    )
    # A scope also has the bindings of the scopes around it.
    parts = scope.split("/") if scope else []
    for depth in range(len(parts) + 1):
        outer = "/".join(parts[:depth])
        values |= gin_config._CONFIG.get((outer, selector), {})
    return values


def unused_bindings(bindings: Sequence[str]) -> dict[str, str]:
    """Returns the bindings that have no effect on the run read last, and why."""
    used = _complete()
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
    """Refuses bindings that have no effect; see `unused_bindings`.

    Raises:
      InputError: for the first of them.
    """
    for key, reason in unused.items():
        raise InputError(f"--gin.{shortened(key)} has no effect: {reason}")
