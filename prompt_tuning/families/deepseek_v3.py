"""DeepSeek V3 and Kimi K2: latent attention, and experts chosen by sigmoids."""

import math

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families import expert_layout
from prompt_tuning.families.family import QKV, Recipes, StoredNames, fused_parts
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.llama import LLAMA
from prompt_tuning.families.llama_layout import NORMS, layout_recipes, read_layout
from prompt_tuning.families.rotary_settings import read_rotary, read_score_scale

DEFAULTS = {
    **{"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
    **{"first_k_dense_replace": 3, "kv_lora_rank": 512},
    **{"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
}
MODULES = {
    "self_attention/query_down": "self_attn.q_a_proj",
    "self_attention/key_value_down": "self_attn.kv_a_proj_with_mqa",
    "self_attention/out": "self_attn.o_proj",
}


def _read_deepseek_v3(settings: HuggingFaceSettings) -> ModelFields:
    compressed = settings.values.get("q_lora_rank", 1536) is not None
    settings = settings.with_defaults(DEFAULTS)
    rotated = settings.size("qk_rope_head_dim")
    width = rotated + settings.size("qk_nope_head_dim")
    fields = read_layout(settings)
    heads = fields["heads"]
    settings.require("num_key_value_heads", heads, "each head has its own keys")
    return {
        **fields,
        **read_rotary(settings, rotated),
        **expert_layout.read_routed_experts(settings),
        "rotary_width": rotated,
        "rotary_interleaved": settings.flag("rope_interleave", True),
        "head_width": width,
        "value_width": settings.size("v_head_dim"),
        "key_value_rank": settings.size("kv_lora_rank"),
        "query_rank": settings.size("q_lora_rank", 1536) if compressed else 0,
        "attention_multiplier": width**-0.5 * read_score_scale(settings),
        "biases": "latent" if settings.flag("attention_bias", False) else "none",
    }


def _deepseek_v3_recipes(config: ModelConfig, names: StoredNames) -> Recipes:
    widths = config.head_width - config.rotated_width, config.width_of_values
    shares = tuple(width // math.gcd(*widths) for width in widths)
    stored = "self_attn.kv_b_proj"
    fused = fused_parts("self_attention", QKV[1:], stored, shares, config.heads)
    query = "q_b_proj" if config.query_rank else "q_proj"
    modules = MODULES | {"self_attention/query": f"self_attn.{query}"}
    norms = NORMS["before"] | {"self_attention/key_norm": "self_attn.kv_a_layernorm"}
    if config.query_rank:
        norms["self_attention/query_norm"] = "self_attn.q_a_layernorm"
    else:
        del modules["self_attention/query_down"]
    modules |= expert_layout.feed_forward_modules(config)
    layout = layout_recipes(config, names, fused=fused, modules=modules, norms=norms)
    return layout | expert_layout.routed_experts(config, expert_layout.prefix_of(names))


# Further layers that predict more tokens at once are not read.
DEEPSEEK_V3 = LLAMA.like(
    "deepseek_v3",
    "DeepSeek V3, V3.1 and R1, Kimi K2",
    _read_deepseek_v3,
    recipes=_deepseek_v3_recipes,
    more_inert=expert_layout.BALANCING
    | {"num_nextn_predict_layers", "num_mtp_layers", "qk_head_dim"},
)
