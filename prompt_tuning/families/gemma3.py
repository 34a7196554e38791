"""Gemma 3, text models: norms of queries and keys, two bases of rotary positions."""

import dataclasses
from typing import Any

from prompt_tuning.families.gemma import GEMMA, read_gemma_layout
from prompt_tuning.families.hf_settings import HuggingFaceSettings
from prompt_tuning.families.layer_settings import (
    alternating,
    read_soft_caps,
    read_windows,
)
from prompt_tuning.families.rotary_settings import read_rotary, read_window_rotary


def read_gemma3(settings: HuggingFaceSettings) -> dict[str, Any]:
    """Returns fields of `ModelConfig`.

    Raises:
      InputError: for a missing setting or an unsupported choice.
    """
    settings.choose("hidden_activation", ("gelu_pytorch_tanh",))
    fields = read_gemma_layout(settings)
    layers = fields["layers"]
    pattern = alternating(layers, settings.size("sliding_window_pattern", 6))
    local_base = settings.positive("rope_local_base_freq", 10_000.0)
    return (
        fields
        | read_rotary(settings, fields["head_width"], base=1_000_000.0)
        | read_windows(settings, layers, pattern)
        | read_window_rotary(settings, local_base)
        | {
            "norm_placement": "around",
            "query_key_norm": "head",
            "attention_multiplier": settings.positive("query_pre_attn_scalar") ** -0.5,
        }
        | read_soft_caps(settings)
    )


GEMMA3 = dataclasses.replace(
    GEMMA,
    model_type="gemma3_text",
    title="Gemma 3, text models",
    read_fields=read_gemma3,
)
