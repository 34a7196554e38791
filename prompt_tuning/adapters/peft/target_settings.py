"""Compare the modules that settings select with those that have tensors.

As in PEFT, a selected module without tensors stays as in the base model. PEFT ignores
tensors of modules that are not selected.
"""

import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from prompt_tuning.adapters.adapter import IA3, LORA
from prompt_tuning.adapters.peft.folder import AdapterFolder
from prompt_tuning.adapters.peft.modules import (
    ALL_LINEAR,
    Projection,
    by_module,
    match_targets,
    shortest_names,
)
from prompt_tuning.adapters.peft.peft_settings import Settings
from prompt_tuning.core.errors import InputError, shortened, shown

MAXIMUM_CHECKED = 32
"""Maximum number of modules to match with a regular expression."""


def check_selection(
    folder: AdapterFolder, names: Mapping[str, str], known: Mapping[str, Projection]
) -> None:
    """Warns of selected modules without tensors; they stay as in the base model.

    Arguments are as in `lora.read_lora`.

    Raises:
      InputError: if the file has tensors of modules that are not selected.
    """
    settings, source = folder.settings, folder.source
    targets = settings.get("target_modules")
    if isinstance(targets, list) and targets:
        modules = {name: names.get(name, name) for name in by_module(known)}
        selected = set(_selected(settings, set(targets), modules))
        others = [name for name in names if name not in selected]
        if others:
            raise InputError(
                f"{source} has tensors of {shortened(names[others[0]])} and "
                f"{len(others) - 1} other modules that its settings do not select "
                f"(target_modules is {shown(targets)}), and which PEFT would ignore: "
                "add them to target_modules, or remove their tensors"
            )
    else:
        # All modules of projections that are adapted in some layer.
        adapted = [x for x in known.values() if not names.keys().isdisjoint(x.modules)]
        selected = {module for projection in adapted for module in projection.modules}
    missing = sorted(selected - names.keys())
    if isinstance(targets, str) and targets != ALL_LINEAR:
        missing = sorted(match_targets(targets, missing[:MAXIMUM_CHECKED]))
    excluded = settings.get("exclude_modules")
    if isinstance(excluded, str):
        missing = missing[:MAXIMUM_CHECKED]
        missing = sorted(set(missing) - match_targets(excluded, missing))
    if missing:
        warnings.warn(
            f"{source} has no tensors of {len(missing)} modules that its settings "
            f"select, such as {missing[0]}: they stay as in the base model, as in "
            "PEFT. Is the file complete?",
            stacklevel=2,
        )


def _selected(
    settings: Settings, targets: set[str], modules: Mapping[str, str]
) -> Iterator[str]:
    """Yields the modules that a list of targets selects, in the layers to adapt.

    `targets` has module names, or their ends after a dot. `modules` has each module's
    name in the file, by its full name.
    """
    excluded = settings.get("exclude_modules")
    excluded = set(excluded) if isinstance(excluded, list) else set()
    for module, name in modules.items():
        ends = _suffixes(module) | _suffixes(name)
        if (
            not ends.isdisjoint(targets)
            and ends.isdisjoint(excluded)
            and _is_in_layers(settings, module)
        ):
            yield module


def _is_in_layers(settings: Settings, module: str) -> bool:
    """Whether a module is in a layer that `layers_to_transform` lists."""
    layers = settings.get("layers_to_transform")
    layers = layers if isinstance(layers, list) else [layers]
    if layers in ([None], []):
        return True
    names = settings.get("layers_pattern") or [""]
    names = names if isinstance(names, list) else [names]
    ends = (rf"{re.escape(str(x))}\.(\d+)\." for x in names)
    found = next((m for end in ends if (m := re.search(end, module))), None)
    return found is not None and int(found[1]) in layers


def _suffixes(module: str) -> set[str]:
    """Returns the names that select a module in a list."""
    parts = module.split(".")
    return {".".join(parts[i:]) for i in range(len(parts))}


def selects(
    settings: Settings, modules: set[str], inputs: set[str], names: set[str]
) -> bool:
    """Whether the settings already select exactly these modules.

    Args:
      settings: settings of a PEFT adapter.
      modules: the adapted modules.
      inputs: modules with inputs scaled by IA3.
      names: all modules that PEFT can adapt.
    """
    targets = settings["target_modules"]
    narrowed = ("exclude_modules", "layers_to_transform", "layers_pattern")
    if not any(settings.get(name) not in (None, []) for name in narrowed):
        selected = match_targets(targets, names)
    elif isinstance(targets, list):
        own_names = {name: name for name in names}
        selected = set(_selected(settings, set(targets), own_names))
    else:
        return False
    return selected == modules and (
        settings["peft_type"] != IA3
        or match_targets(settings["feedforward_modules"], modules) == inputs
    )


def target_settings(
    kind: str, modules: set[str], inputs: set[str], names: set[str]
) -> dict[str, Any]:
    """Returns the settings that select exactly these modules; see `selects`.

    IA3's feed-forward modules must be among its targets under the same names.
    """
    narrowed: dict[str, Any] = {"exclude_modules": None}
    if kind == LORA:
        narrowed |= {"layers_to_transform": None, "layers_pattern": None}
        return narrowed | {"target_modules": shortest_names(modules, names)}
    feed_forward = shortest_names(inputs, names)
    after = shortest_names(modules - inputs, names)
    return narrowed | {
        "target_modules": sorted(feed_forward + after),
        "feedforward_modules": feed_forward,
    }
