"""Convert LoRA and IA3 between PEFT's form and ours."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from prompt_tuning.adapters.adapter import IA3, LORA, Adapter, Arrays
from prompt_tuning.adapters.peft import lora, lora_biases, peft_settings
from prompt_tuning.adapters.peft.expert_parameters import (
    WEIGHT,
    check_names,
    is_parameter,
)
from prompt_tuning.adapters.peft.folder import AdapterFolder
from prompt_tuning.adapters.peft.ia3 import read_ia3, write_ia3
from prompt_tuning.adapters.peft.modules import (
    Projection,
    by_module,
    expert_projections,
    find_name,
    full_name,
    projections,
    routers,
    shortest_names,
    single_experts,
    unread_modules,
)
from prompt_tuning.adapters.peft.moved_base import as_plain_lora, moves_base
from prompt_tuning.adapters.peft.peft_settings import Settings
from prompt_tuning.adapters.peft.shape_checks import LORA_A, LORA_MAGNITUDE, module_name
from prompt_tuning.adapters.peft.table_copies import FrozenReader
from prompt_tuning.adapters.peft.target_settings import (
    check_selection,
    selects,
    target_settings,
)
from prompt_tuning.core.errors import InputError, shortened
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families import hf_folder


def with_defaults(adapter: Adapter) -> dict[str, Any]:
    """Returns an adapter's PEFT settings, completed with the defaults."""
    method = adapter.settings.get("peft_type", adapter.kind)
    return (
        peft_settings.DEFAULTS[method] | {"peft_type": method} | dict(adapter.settings)
    )


def read_projections(
    folder: AdapterFolder, config: ModelConfig, frozen: FrozenReader | None = None
) -> Adapter:
    """Converts PEFT's LoRA or IA3 to ours.

    Raises:
      InputError: if a module or shape does not fit the model.
    """
    known, experts = projections(config), expert_projections(config)
    source = folder.source
    if folder.kind == LORA:
        known |= experts
    modules = set(by_module(known))
    family = hf_folder.find_family(config)
    given = sorted({module_name(name) for name in folder.tensors})
    places = single_experts(config) if folder.kind == LORA else {}
    weights = routers(config) if folder.kind == LORA else {}
    renamed = {*places, *weights}
    found = {x: find_name(x, renamed, family.prefix_aliases) for x in given}
    singles = {name: module for module, name in found.items() if name in places}
    names = {weights[name]: x for x, name in found.items() if name in weights}
    given = [module for module in given if found[module] is None]
    unread = [name for name in given if _starts_with(name, family.unread_parts)]
    names |= {
        full_name(module, modules, source, family.prefix_aliases): module
        for module in given
        if module not in unread
    }
    if not names and not singles:
        raise InputError(
            f"{source} adapts only modules that texts do not pass, such as "
            f"{shortened(given[0])}"
        )
    if folder.kind == LORA and moves_base(folder.settings):
        folder = as_plain_lora(folder, names, known, frozen)
    if folder.kind == IA3:
        parameters, scalings = read_ia3(folder, names, known), {}
    else:
        parameters, scalings = lora.read_lora(folder, names, known)
        of_singles = lora.read_single_experts(folder, singles, places, experts)
        parameters |= of_singles[0]
        scalings |= of_singles[1]
    plain = {name: given for name, given in names.items() if not is_parameter(name)}
    if plain:
        known = {path: x for path, x in known.items() if path not in experts}
        check_selection(folder, plain, known)
    if unread:
        warnings.warn(
            f"{source} adapts {len(unread)} modules that texts do not pass, such as "
            f"{shortened(unread[0])}: they are left out",
            stacklevel=2,
        )
    return Adapter(
        kind=folder.kind,
        parameters=parameters,
        scalings=scalings,
        settings=folder.settings,
    )


def _starts_with(module: str, parts: Sequence[str]) -> bool:
    """Whether a module belongs to one of the named parts of a model."""
    return module.removeprefix("model.").split(".")[0] in parts


def write_projections(
    adapter: Adapter, config: ModelConfig
) -> tuple[Arrays, dict[str, Any]]:
    """Returns the tensors of LoRA or IA3, and the settings that select modules."""
    known = projections(config)
    if adapter.kind == LORA:
        known |= expert_projections(config)
    check_projections(adapter, known)
    settings, holders = with_defaults(adapter), by_module(known)
    derived: dict[str, Any] = {}
    biases: Arrays = {}
    if adapter.kind == IA3:
        tensors = write_ia3(adapter.parameters, known)
    else:
        tensors, scalings = lora.write_lora(adapter.parameters, adapter.scalings, known)
        biases = lora_biases.write_biases(adapter, config)
        derived["use_dora"] = _has_dora(tensors)
        if not _has_scalings(settings, tensors, scalings, holders):
            derived |= lora.lora_settings(tensors, scalings, settings, holders)
        derived["bias"] = lora_biases.biases_of(adapter)
    modules = {module_name(name) for name in tensors}
    parameters = {module for module in modules if is_parameter(module)}
    if adapter.kind == LORA:
        # Of the weights of all modules, the routers' are selected.
        others = [x if is_parameter(x) else f"{x}{WEIGHT}" for x in holders]
        derived["target_parameters"] = shortest_names(parameters, others) or None
    if parameters and adapter.kind == LORA:
        if derived["use_dora"]:
            raise InputError(
                f"{min(parameters)} has DoRA, which PEFT does not support for routers: "
                "merge it into the model (convert --merge), or adapt other projections"
            )
        # PEFT refuses dropout next to parameters, and it matters in training alone.
        derived["lora_dropout"] = 0.0
    modules -= parameters
    if adapter.kind == LORA:
        check_names(modules, config.family)
    derived["fan_in_fan_out"] = any(holders[module][0].in_first for module in modules)
    names = {x for x in holders if not is_parameter(x)} | unread_modules(config)
    inputs = {module for module in modules if holders[module][0].scales_input}
    # Names of single experts among the targets would select their parameters again.
    if parameters or not selects(settings, modules, inputs, names):
        derived |= target_settings(adapter.kind, modules, inputs, names)
    return tensors | lora_biases.named_in_peft(biases, modules), derived


def _has_dora(tensors: Arrays) -> bool:
    """Whether the modules have DoRA.

    Raises:
      InputError: if only some have, because PEFT has one setting for all.
    """
    modules = {module_name(name) for name in tensors}
    with_dora = {module_name(name) for name in tensors if name.endswith(LORA_MAGNITUDE)}
    if with_dora and modules != with_dora:
        raise InputError(
            f"{min(with_dora)} has DoRA and {min(modules - with_dora)} has not, but "
            "PEFT has one setting for all modules of an adapter"
        )
    return bool(with_dora)


def check_projections(adapter: Adapter, known: Mapping[str, Projection]) -> None:
    """Checks that every parameter of a LoRA or IA3 belongs to a projection.

    Raises:
      InputError: for the first parameter that does not, or if there are none.
    """
    for path in adapter.parameters:
        projection, _, leaf = path.partition("/adapters/")
        if path.endswith(lora_biases.BIAS):
            continue  # also of norms and the head; `write_biases` checks them
        if projection not in known or not leaf.startswith(f"{adapter.kind.lower()}/"):
            raise InputError(
                f"{path} does not belong to {adapter.kind} of a projection of this "
                "model; was it trained on another model?"
            )
    if not adapter.parameters:
        raise InputError(f"there is no {adapter.kind} to write")


def _has_scalings(
    settings: Settings,
    tensors: Arrays,
    scalings: Mapping[str, float],
    known: Mapping[str, Sequence[Projection]],
) -> bool:
    """Whether the settings already set every module's rank and scaling."""
    ranks = {
        module_name(name): len(x) // (known[module_name(name)][0].experts or 1)
        for name, x in tensors.items()
        if LORA_A in name
    }
    return all(
        peft_settings.rank_of(settings, module) == ranks[module]
        and peft_settings.scaling_of(settings, module) == scaling
        for module, scaling in scalings.items()
    )
