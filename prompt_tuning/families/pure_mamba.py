"""Mamba (Gu and Dao 2023) and Falcon Mamba: only selective scans as layers."""

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families.family import Recipes, StoredNames
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.memory_layout import mamba_tensors, read_mamba
from prompt_tuning.families.pure_mamba2 import (
    MAMBA2,
    read_without_attention,
    recipes_without_attention,
)

NAMES = {
    **{"states": "state_size", "taps": "conv_kernel", "rank": "time_step_rank"},
    **{"bias": "use_bias", "tap_bias": "use_conv_bias"},
}


def _read_pure_mamba(settings: HuggingFaceSettings) -> ModelFields:
    fields = read_without_attention(settings, tied=True)
    layers, width = range(fields["layers"]), fields["width"]
    # Falcon Mamba 7B has another `expand`, which its size takes precedence over.
    inner = settings.size("intermediate_size", settings.size("expand", 2) * width)
    mixer = read_mamba(settings, layers, width, inner, NAMES)
    return fields | mixer | {"recurrent_norm": False}


def _read_falcon_mamba(settings: HuggingFaceSettings) -> ModelFields:
    """Returns fields of `ModelConfig`; see `_read_pure_mamba`."""
    return _read_pure_mamba(settings) | {
        **{"recurrent_norm": True, "recurrent_norm_scaled": False},
        "recurrent_norm_epsilon": settings.positive("mixer_rms_eps", 1e-6),
    }


def _pure_mamba_recipes(config: ModelConfig, names: StoredNames) -> Recipes:
    return recipes_without_attention(config, names, mamba_tensors(config, "mixer"))


MAMBA = MAMBA2.like(
    "mamba",
    "Mamba",
    _read_pure_mamba,
    recipes=_pure_mamba_recipes,
    inert=(MAMBA2.inert - {"chunk_size", "time_step_rank"})
    | {"use_mambapy", "use_associative_scan"}
    | {"time_step_init_scheme", "time_step_scale"},
)
FALCON_MAMBA = MAMBA.like("falcon_mamba", "Falcon Mamba", _read_falcon_mamba)
