"""Qwen3-Next: gated delta rule, gated attention and experts."""

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families import expert_layout
from prompt_tuning.families.family import QKV, Recipes, StoredNames, fused_parts
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.qwen2_moe import shared_experts
from prompt_tuning.families.qwen3_5 import qwen3_5_recipes
from prompt_tuning.families.qwen3_5_moe import QWEN3_5_MOE_TEXT, read_qwen3_5_moe


def _read_qwen3_next(settings: HuggingFaceSettings) -> ModelFields:
    normalized = settings.flag("norm_topk_prob", True)
    return {
        **read_qwen3_5_moe(settings),
        **expert_layout.read_dense_layers(settings),
        "normalize_experts": normalized,
    }


def _qwen3_next_recipes(config: ModelConfig, names: StoredNames) -> Recipes:
    groups = config.recurrent_key_heads
    values = config.recurrent_heads // max(groups, 1)
    keys, wide = config.recurrent_key_width, values * config.recurrent_width
    # Of each key head: its query and key, then the values and gates of its value heads.
    shares = (keys, keys, wide, wide)
    place, module = "gated_delta", "linear_attn.in_proj_"
    fused = fused_parts(place, (*QKV, "gate"), f"{module}qkvz", shares, groups)
    fused |= fused_parts(place, ("strength", "decay"), f"{module}ba", groups=groups)
    prefix = expert_layout.prefix_of(names)
    return (
        qwen3_5_recipes(config, names, fused=fused)
        | expert_layout.separate_experts(config, prefix)
        | shared_experts(config, prefix)
    )


QWEN3_NEXT = QWEN3_5_MOE_TEXT.like(
    "qwen3_next", "Qwen3-Next", _read_qwen3_next, recipes=_qwen3_next_recipes
)
