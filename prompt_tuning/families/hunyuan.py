"""Hunyuan, dense and with experts: norms of queries and keys after rotation."""

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families import llama_layout, rotary_settings
from prompt_tuning.families.expert_layout import ATTENTION, prefix_of, separate_experts
from prompt_tuning.families.family import Recipes, StoredNames
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.llama import LLAMA

NORMS = {
    "self_attention/query_norm": "self_attn.query_layernorm",
    "self_attention/key_norm": "self_attn.key_layernorm",
}
SHARED = {f"mlp/shared/{name}": name for name in ("gate", "up", "down")}


def _read_hunyuan(settings: HuggingFaceSettings) -> ModelFields:
    fields = llama_layout.read_rotated(settings, epsilon=1e-5)
    biased = settings.flag("attention_bias", False)
    base, width = fields["rotary_base"], fields["head_width"]
    return {
        **fields,
        "rotary_base": rotary_settings.read_stretched_base(settings, base, width),
        "query_key_norm": "head_after",
        "biases": "attention" if biased else "none",
    }


def _read_hunyuan_moe(settings: HuggingFaceSettings) -> ModelFields:
    fields = _read_hunyuan(settings)
    total, used = settings.size("num_experts", 1), settings.value("moe_topk", 1)
    counts = set(used) if isinstance(used, list) else {used}
    count = counts.pop() if counts else None
    if counts or type(count) is not int or not 1 <= count <= total:
        settings.refuse("moe_topk", f"a number up to {total}, the same in all layers")
    return fields | {
        "experts": total,
        "experts_per_token": count,
        "shared_expert_width": fields["feed_forward_width"],
        "shared_expert_gated": False,
    }


def _hunyuan_recipes(config: ModelConfig, names: StoredNames) -> Recipes:
    modules, experts = llama_layout.PROJECTIONS, {}
    if config.experts:
        modules = ATTENTION | {
            ours: f"mlp.shared_mlp.{name}_proj" for ours, name in SHARED.items()
        }
        experts = separate_experts(config, prefix_of(names), router="gate.wg")
    layout = llama_layout.layout_recipes(
        config, names, modules=modules, query_key_norms=NORMS
    )
    return layout | experts


HUNYUAN_DENSE = LLAMA.like(
    "hunyuan_v1_dense",
    "Hunyuan 0.5B to 7B",
    _read_hunyuan,
    recipes=_hunyuan_recipes,
    more_inert={"eod_token_id"},
)
HUNYUAN_MOE = HUNYUAN_DENSE.like(
    "hunyuan_v1_moe",
    "Hunyuan A13B, mixture of experts",
    _read_hunyuan_moe,
    more_inert={"sep_token_id", "output_router_logits"},
)
