"""Writes the config of a run from Python, for its directory."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prompt_tuning.config.deferred_factories import Configured
from prompt_tuning.config.factories import FACTORIES
from prompt_tuning.config.gin_files import prompt_names
from prompt_tuning.config.gin_text import gin_bindings
from prompt_tuning.config.run import Run
from prompt_tuning.core.errors import kind_of
from prompt_tuning.prompts.prompt_module import PromptModule
from prompt_tuning.settings.rollout_settings import Rollouts

CHANGED_DEFAULTS = ("buckets",)
"""Fields that are always written, because an earlier version had another default."""


def run_config(run: Run) -> str:
    """Writes a run's fields as a config that reads back as the same run.

    Objects that a config cannot hold, such as an optax transformation, are replaced by
    stand-ins, which evaluation and generation do not need.
    """
    return "\n".join(gin_bindings(_described(run), prompt_names())) + "\n"


def stand_in(value: Any) -> Configured:
    """Returns the settings that stand for an object that a config cannot hold."""
    prompt = own_prompt(value)
    if prompt is not None:
        given = ", ".join(f"{name}={_brief(x)}" for name, x in prompt.keywords.items())
        description = f"{prompt.func.__name__}({given})"
        return Configured("prompt_from_python", {"description": description})
    factory = "optimizer_from_python" if _is_optimizer(value) else "ObjectiveFromPython"
    value = getattr(value, "wrapped", value)
    name = getattr(value, "__name__", None) or f"{kind_of(value)}"
    return Configured(factory, {"description": name})


def _brief(value: Any) -> str:
    """Returns a value as text, which is the same when the program is started again."""
    address = " at 0x" in repr(value)
    return str(getattr(value, "__name__", kind_of(value))) if address else repr(value)


def own_prompt(value: Any) -> functools.partial | None:
    """Returns a class of prompts, or a `functools.partial` of one, as a partial.

    Anything else gives None.
    """
    partial = value if isinstance(value, functools.partial) else None
    cls = value if partial is None else partial.func
    if not (isinstance(cls, type) and issubclass(cls, PromptModule)):
        return None
    return functools.partial(cls) if partial is None else partial


def _is_optimizer(value: Any) -> bool:
    return hasattr(value, "init") and hasattr(value, "update")


def _described(value: Any) -> Any:
    if isinstance(value, Configured):
        return value
    if isinstance(value, Rollouts):
        value = value.described()
    if dataclasses.is_dataclass(value) and type(value).__name__ in FACTORIES:
        return Configured(
            type(value).__name__,
            {
                field.name: _described(getattr(value, field.name))
                for field in dataclasses.fields(value)
                if field.init and not _is_default(field, getattr(value, field.name))
            },
        )
    if isinstance(value, functools.partial):
        name = getattr(value.func, "__name__", "")
        if name in FACTORIES and not value.args:
            settings = {key: _described(x) for key, x in value.keywords.items()}
            return Configured(name, settings)
    if isinstance(value, type) and value.__name__ in FACTORIES:
        return Configured(value.__name__)
    if isinstance(value, Mapping):
        return {key: _described(x) for key, x in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_described(x) for x in value)
    if isinstance(value, Sequence | Path | bool | int | float) and not hasattr(
        value, "_fields"
    ):
        return value
    return None if value is None else stand_in(value)


def _is_default(field: dataclasses.Field, value: Any) -> bool:
    if field.name in CHANGED_DEFAULTS:
        return False
    default = field.default
    return default is not dataclasses.MISSING and (default is value or default == value)
