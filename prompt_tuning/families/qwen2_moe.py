"""Qwen 1.5 and 2 with experts; one expert processes every token."""

import dataclasses
from collections.abc import Collection
from typing import Any

from prompt_tuning.checkpoints.stored_tensors import Recipe, layered, transpose
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families.expert_layout import (
    BALANCING,
    PATH,
    expert_recipes,
    read_experts,
    require_all_sparse,
)
from prompt_tuning.families.hf_settings import HuggingFaceSettings
from prompt_tuning.families.layer_settings import read_windows
from prompt_tuning.families.llama import LLAMA
from prompt_tuning.families.llama_layout import INERT, PREFIX, read_layout
from prompt_tuning.families.rotary_settings import FULL, SLIDING, read_rotary

SHARED = {
    f"shared/{name}": f"shared_expert.{name}_proj" for name in ("gate", "up", "down")
} | {"shared_gate": "shared_expert_gate"}


def read_qwen2_moe(settings: HuggingFaceSettings) -> dict[str, Any]:
    """Returns fields of `ModelConfig`.

    Raises:
      InputError: for a missing setting or an unsupported choice.
    """
    require_all_sparse(settings)
    fields = read_layout(settings)
    layers, last = fields["layers"], 0
    if settings.flag("use_sliding_window", False):
        last = settings.integer("max_window_layers", 28, minimum=0)
    kinds = [FULL if i % 2 or i >= last else SLIDING for i in range(layers)]
    return (
        fields
        | read_rotary(settings, fields["head_width"])
        | read_windows(settings, layers, kinds)
        | read_experts(settings)
        | {
            "feed_forward_width": settings.size("moe_intermediate_size"),
            "shared_expert_width": settings.size("shared_expert_intermediate_size"),
            "biases": "qkv" if settings.flag("qkv_bias", True) else "none",
            "normalize_experts": settings.flag("norm_topk_prob", False),
        }
    )


def qwen2_moe_recipes(config: ModelConfig, names: Collection[str]) -> dict[str, Recipe]:
    """Returns the recipes of all parameters; see `Family.recipes`."""
    prefix = "" if "embed_tokens.weight" in names else PREFIX
    shared = {
        f"{PATH}/{ours}/kernel": layered(
            f"{prefix}layers.{{}}.mlp.{name}.weight", config.layers, transpose
        )
        for ours, name in SHARED.items()
    }
    return expert_recipes(config, names) | shared


QWEN2_MOE = dataclasses.replace(
    LLAMA,
    model_type="qwen2_moe",
    title="Qwen 1.5 and 2, mixtures of experts",
    read_fields=read_qwen2_moe,
    recipes=qwen2_moe_recipes,
    write_settings=None,
    inert=INERT | BALANCING,
)
