"""Ministral 3: a Mistral with YaRN, and queries scaled by their position."""

import dataclasses

from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.mistral import MISTRAL, read_mistral
from prompt_tuning.families.rotary_settings import read_query_scaling

DEFAULTS = {
    "sliding_window": None,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
}
ROTARY = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Rotary settings of `transformers.Ministral3Config` if a folder has none."""


def read_ministral3(settings: HuggingFaceSettings) -> ModelFields:
    """Returns fields of `ModelConfig`; see `Family.read_fields`."""
    values = {**DEFAULTS, **settings.values}
    if "rope_parameters" not in settings and "rope_scaling" not in settings:
        values["rope_parameters"] = ROTARY
    settings = dataclasses.replace(settings, values=values)
    return read_mistral(settings) | read_query_scaling(settings)


MINISTRAL3 = MISTRAL.like("ministral3", "Ministral 3", read_ministral3)
