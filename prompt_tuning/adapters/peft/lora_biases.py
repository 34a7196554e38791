"""Biases that PEFT trains together with LoRA (`bias` is "lora_only" or "all").

A file has them by their names in the model: `attn.c_attn.base_layer.bias` for an
adapted module (without `base_layer` in older files), and `ln_1.bias` for any other.
"""

import warnings
from collections.abc import Collection, Mapping

import numpy as np

from prompt_tuning.adapters.adapter import Adapter, Arrays
from prompt_tuning.adapters.peft.modules import find_name
from prompt_tuning.adapters.peft.peft_settings import Settings, setting
from prompt_tuning.adapters.peft.shape_checks import MODEL_PREFIX
from prompt_tuning.checkpoints.stored_tensors import FusedPart, Recipe
from prompt_tuning.core.errors import InputError, shortened
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families import hf_folder
from prompt_tuning.settings.lora_settings import TrainedBiases

BIAS, FROZEN, A = "/adapters/lora/bias", "/bias", "/adapters/lora/a"
BASE, ENDING = ".base_layer", ".bias"


def trainable_biases(
    config: ModelConfig, names: Collection[str] = ()
) -> dict[str, Recipe]:
    """Returns the biases that PEFT trains, by the path of their layer.

    These are all parameters of transformers' model with names that end in `.bias`.

    Args:
      config: config of the model.
      names: names of the stored tensors, as for `hf_folder.find_recipes`.
    """
    return {
        path.removesuffix(FROZEN): recipe
        for path, recipe in hf_folder.find_recipes(config, names).items()
        if path.endswith(FROZEN) and recipe.sources[0].endswith(ENDING)
    }


def biases_of(adapter: Adapter) -> TrainedBiases:
    """Returns which biases an adapter trains: "none", "lora_only" or "all"."""
    layers = [p.removesuffix(BIAS) for p in adapter.parameters if p.endswith(BIAS)]
    if not layers:
        return "none"
    adapted = all(path + A in adapter.parameters for path in layers)
    setting = adapter.settings.get("bias")
    return "lora_only" if adapted and setting != "all" else "all"


def split_biases(settings: Settings, tensors: Arrays) -> tuple[Arrays, Arrays]:
    """Splits a file's tensors into trained biases and all others."""
    if settings["peft_type"] != "LORA" or setting(settings, "bias") == "none":
        return {}, tensors
    biases = {name: x for name, x in tensors.items() if name.endswith(ENDING)}
    return biases, {name: x for name, x in tensors.items() if name not in biases}


def read_biases(
    tensors: Arrays, adapter: Adapter, config: ModelConfig, source: str
) -> Arrays:
    """Returns our parameters.

    Args:
      tensors: the first result of `split_biases`.
      adapter: the adapter's LoRA. Layers without one get zeros for the frozen bias.
      config: config of the model.
      source: origin of the adapter, for messages.

    Raises:
      InputError: if a bias is unknown to the model, missing, or not a vector.
    """
    choice = setting(adapter.settings, "bias")
    recipes = trainable_biases(config)
    by_name = _by_name(tensors, recipes, config, source)
    if not by_name:
        if choice != "none":
            warnings.warn(
                f"{source} has bias = {choice!r}, but no biases: they stay as in the "
                "base model, as in PEFT",
                stacklevel=3,
            )
        return {}
    parameters: Arrays = {}
    for path, recipe in recipes.items():
        lora = adapter.parameters.get(path + A)
        if choice == "lora_only" and lora is None:
            continue
        used = [True] * len(recipe.sources)
        if choice == "lora_only" and lora is not None:
            used = [
                bool(layer.any()) or name in by_name
                for name, layer in zip(recipe.sources, lora, strict=True)
            ]
        if not any(used):
            continue
        layers = [
            _read(by_name, name, recipe, source) if own else None
            for name, own in zip(recipe.sources, used, strict=True)
        ]
        size = next(len(x) for x in layers if x is not None)
        zeros = np.zeros(size, np.float32)
        arrays = [zeros if x is None else x for x in layers]
        parameters[path + BIAS] = np.stack(arrays) if recipe.stacked else arrays[0]
    return parameters


def _by_name(
    tensors: Arrays, recipes: Mapping[str, Recipe], config: ModelConfig, source: str
) -> Arrays:
    """Returns the biases by their names in transformers' model."""
    known = {name for recipe in recipes.values() for name in recipe.sources}
    family = hf_folder.find_family(config)
    biases: Arrays = {}
    for name, tensor in tensors.items():
        stem = name.removeprefix(MODEL_PREFIX).replace(BASE + ENDING, ENDING)
        found = find_name(stem, known, family.prefix_aliases)
        if found is not None:
            biases[found] = tensor
        elif stem.removeprefix("model.").split(".")[0] not in family.unread_parts:
            raise InputError(
                f"{source} has a trained bias {shortened(name)}, which this model does "
                "not have; was it trained on another model?"
            )
    return biases


def _read(given: Arrays, name: str, recipe: Recipe, source: str) -> np.ndarray:
    """Returns one layer's bias, or a projection's part of it."""
    if name not in given:
        raise InputError(
            f"{source} has trained biases, but none of {name}; is the file complete?"
        )
    transform, count = recipe.transform, 1
    if isinstance(transform, FusedPart):
        count = sum(transform.shares) * transform.groups
    if given[name].ndim != 1 or given[name].size % count:
        raise InputError(
            f"{source} has a trained bias of {name} of shape {given[name].shape}, "
            f"expected a vector of a multiple of {count} numbers"
        )
    return transform(given[name])


def write_biases(
    adapter: Adapter, config: ModelConfig, names: Collection[str] = ()
) -> Arrays:
    """Returns the modules' trained biases by their names in transformers' model.

    Args:
      adapter: a LoRA, or another adapter, which has no biases.
      config: config of the model.
      names: names of the stored tensors, as for `hf_folder.find_recipes`.

    Raises:
      InputError: if the model lacks one, or a part of a module is missing.
    """
    recipes = trainable_biases(config, names)
    parameters, choice = adapter.parameters, biases_of(adapter)
    layers = [path.removesuffix(BIAS) for path in parameters if path.endswith(BIAS)]
    other = next((path for path in layers if path not in recipes), None)
    if other is not None:
        raise InputError(
            f"{other}{BIAS} is no bias that PEFT trains in this model; was it trained "
            "on another one?"
        )
    chosen = {path: recipes[path] for path in layers}
    sources = {name for recipe in chosen.values() for name in recipe.sources}
    for path, recipe in recipes.items():
        if path not in chosen and not sources.isdisjoint(recipe.sources):
            raise InputError(
                f"the bias of {path} is not trained, but others in the same module of "
                "transformers are: PEFT trains the biases of whole modules"
            )
    arrays = {path: parameters[path + BIAS] for path in chosen}
    written = dict(hf_folder.stored_arrays(arrays, chosen))
    if choice != "lora_only":
        return written
    return {
        name: written[name]
        for path, recipe in chosen.items()
        for name, a in zip(recipe.sources, parameters[path + A], strict=True)
        if a.any()
    }


def named_in_peft(biases: Arrays, adapted: Collection[str]) -> Arrays:
    """Returns the result of `write_biases` by PEFT's names.

    `adapted` lists the modules with LoRA.
    """
    tensors: Arrays = {}
    for name, bias in biases.items():
        module = name.removesuffix(ENDING)
        base = BASE if module in adapted else ""
        tensors[f"{MODEL_PREFIX}{module}{base}{ENDING}"] = bias
    return tensors
