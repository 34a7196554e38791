"""Finds the class of an adapter by its kind or its arrays.

A prompt class or adapter spec states which kind it can be rebuilt from. These functions
search the listed factories by name, or by the arrays in a file.
"""

import functools
import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from prompt_tuning.adapters.adapter import (
    CLASSES,
    CLASSES_FOLDER,
    CLASSES_PATH,
    TOKENS,
    Arrays,
)
from prompt_tuning.core.errors import InputError, shortened, shown
from prompt_tuning.core.layer_kinds import key_layers
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.prompts import FACTORIES
from prompt_tuning.prompts.projection_adapters import AdapterSpec
from prompt_tuning.prompts.prompt_module import Attachment, PromptModule

_PROMPT_LEAF = re.compile(r"(encoder|decoder)/prompt/(\w+)")
_ADAPTER_LEAF = re.compile(r".*/adapters/(\w+)/.*")

Shapes = Mapping[str, tuple[int, ...]]


@functools.cache
def load_factories() -> tuple[Any, ...]:
    """Imports the factories that `FACTORIES` lists."""
    return tuple(
        getattr(importlib.import_module(module), name)
        for name, module in FACTORIES.items()
    )


@functools.cache
def prompt_classes() -> dict[str, type[PromptModule]]:
    """Returns the prompt classes by the kind that they are rebuilt from."""
    return {
        factory.form.kind: factory
        for factory in load_factories()
        # Subclasses inherit a form, and are rebuilt as the class that defines it.
        if isinstance(factory, type) and vars(factory).get("form") is not None
    }


@functools.cache
def adapter_specs() -> dict[str, type[AdapterSpec]]:
    """Returns the classes of projection adapters by kind."""
    return {
        factory.kind: factory
        for factory in load_factories()
        if isinstance(factory, type) and issubclass(factory, AdapterSpec)
    }


def check_kinds(kinds: Sequence[str]) -> None:
    """Checks that kinds of adapters exist.

    Raises:
      InputError: for the first unknown one.
    """
    known = [*prompt_classes(), *adapter_specs(), TOKENS, CLASSES]
    for kind in kinds:
        if kind not in known:
            raise InputError(
                f"{shown(kind)} is not a kind of adapter, expected one of "
                f"{', '.join(known)}"
            )


def find_prompt_class(shapes: Shapes) -> type[PromptModule] | None:
    """Finds the class of a prompt by its arrays."""
    for prompt_class in prompt_classes().values():
        if prompt_class.form is not None and prompt_class.form.matches(shapes):
            return prompt_class
    return None


def prompt_shapes(parameters: Arrays) -> dict[str, dict[str, tuple[int, ...]]]:
    """Returns the shapes of each stack's prompt, by stack and leaf."""
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for path, array in parameters.items():
        match = _PROMPT_LEAF.fullmatch(path)
        if match is not None:
            shapes.setdefault(match[1], {})[match[2]] = array.shape
    return shapes


def check_prompt_sizes(parameters: Arrays, config: ModelConfig, source: str) -> None:
    """Checks that prompts have the layers, heads and widths of a model.

    Raises:
      InputError: for the first array that does not.
    """
    for stack, shapes in prompt_shapes(parameters).items():
        prompt_class = find_prompt_class(shapes)
        if prompt_class is None or prompt_class.form is None:
            continue
        layers = config.encoder_layers if stack == "encoder" else config.layers
        sizes = {"L": layers, "D": config.width}
        if prompt_class.attachment is Attachment.KEYS_AND_VALUES:
            layers = layers if stack == "encoder" else key_layers(config)
            heads = config.key_value_heads
            sizes = {"L": layers, "G": heads, "K": config.head_width}
        for leaf, axes in prompt_class.form.axes.items():
            found = tuple(shapes[leaf])
            pairs = zip(axes.split(), found, strict=True)
            expected = tuple(sizes.get(axis, size) for axis, size in pairs)
            if expected != found:
                raise InputError(
                    f"{source} contains {stack}/prompt/{leaf} of shape {found}, but "
                    f"the model has shape {expected}; was it tuned on another model?"
                )


def find_kind(parameters: Arrays, source: str) -> str:
    """Finds the kind of an adapter by the paths and axes of its parameters.

    Raises:
      InputError: if their kinds differ, or if a module must evaluate the prompt first.
    """
    if CLASSES_PATH in parameters:  # alone, or beside what gives the kind
        parameters = {
            p: x for p, x in parameters.items() if not p.startswith(CLASSES_FOLDER)
        }
        if not parameters:
            return CLASSES
    names = {spec.name: kind for kind, spec in adapter_specs().items()}
    kinds: dict[str, str | None] = {}
    for path in parameters:
        match = _ADAPTER_LEAF.fullmatch(path)
        kinds[path] = names.get(match[1]) if match else None
    for stack, shapes in prompt_shapes(parameters).items():
        prompt_class = find_prompt_class(shapes)
        if prompt_class is not None and prompt_class.form is not None:
            kind = prompt_class.form.kind
            kinds |= {f"{stack}/prompt/{leaf}": kind for leaf in shapes}
    unknown = [path for path, kind in kinds.items() if kind is None]
    if unknown or len(set(kinds.values())) != 1:
        paths = shortened(", ".join((unknown or sorted(parameters))[:5]))
        raise InputError(
            f"{source} contains {paths}, which is not one adapter of a "
            "kind that can be recognized by its names; convert the run's directory, "
            "which records its modules"
        )
    return str(next(iter(kinds.values())))
