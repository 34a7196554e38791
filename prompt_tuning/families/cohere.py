"""Cohere's Command R and R7B: parallel layers, layer norms without bias."""

import dataclasses

from prompt_tuning.checkpoints.stored_tensors import flattened
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families.family import Recipes, StoredNames
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.layer_settings import alternating, read_windows
from prompt_tuning.families.llama import LLAMA
from prompt_tuning.families.llama_layout import layout_recipes, read_rotated


def _read_cohere(settings: HuggingFaceSettings) -> ModelFields:
    normed = "each_head" if settings.flag("use_qk_norm", False) else "none"
    return _read_cohere_layout(settings, 500_000.0) | {"query_key_norm": normed}


def _read_cohere2(settings: HuggingFaceSettings) -> ModelFields:
    """Returns fields of `ModelConfig`; only layers with a window are rotated."""
    fields = _read_cohere_layout(settings, 10_000.0)
    layers = fields["layers"]
    kinds = alternating(layers, settings.size("sliding_window_pattern", 4))
    windows = read_windows(settings, layers, kinds)
    rotated = windows.get("windowed_layers", ())
    unrotated = tuple(layer for layer in range(layers) if layer not in rotated)
    return fields | windows | {"unrotated_layers": unrotated}


def _read_cohere_layout(settings: HuggingFaceSettings, base: float) -> ModelFields:
    """Reads the fields of both versions; `base` is the default of `rope_theta`."""
    fields = read_rotated(settings, tied=True, base=base)
    biases = "attention" if settings.flag("attention_bias", False) else "none"
    return fields | {
        "norm": "layer_scale",
        "norm_epsilon": settings.positive("layer_norm_eps", 1e-5),
        "parallel": True,
        "shared_norm": True,
        "rotary_interleaved": True,
        "biases": biases,
        "logit_multiplier": settings.positive("logit_scale", 0.0625),
    }


def _cohere_recipes(config: ModelConfig, names: StoredNames) -> Recipes:
    recipes = layout_recipes(config, names)
    # Norms of heads are stored [H, K].
    return {
        path: dataclasses.replace(recipe, transform=flattened)
        if path.endswith(("query_norm/scale", "key_norm/scale"))
        else recipe
        for path, recipe in recipes.items()
    }


COHERE = LLAMA.like("cohere", "Command R and R+", _read_cohere, recipes=_cohere_recipes)
COHERE2 = COHERE.like("cohere2", "Command R7B and A", _read_cohere2)
