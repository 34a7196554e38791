"""LFM2 with experts chosen by sigmoids, after layers without experts."""

from prompt_tuning.checkpoints.stored_tensors import identity
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families.expert_layout import (
    LAYERS,
    expert_tensors,
    prefix_of,
    read_experts,
    separate_experts,
)
from prompt_tuning.families.family import Recipes, StoredNames
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.lfm2 import LFM2, lfm2_recipes, read_lfm2_layers

BLOCK = "feed_forward"


def _read_lfm2_moe(settings: HuggingFaceSettings) -> ModelFields:
    fields, layers = read_lfm2_layers(settings), settings.layers(LAYERS)
    settings.require("use_expert_bias", True, "the choice of experts needs it")
    first = settings.integer("num_dense_layers", 2, minimum=0)
    if first >= layers:
        settings.refuse("num_dense_layers", f"less than {LAYERS}, {layers}")
    return {
        **fields,
        **read_experts(settings),
        "feed_forward_width": settings.size("moe_intermediate_size", 1792),
        "dense_layers": tuple(range(first)),
        "dense_width": settings.size("intermediate_size") if first else 0,
        "routing": "sigmoid",
        "expert_multiplier": settings.positive("routed_scaling_factor", 1.0),
        "normalize_experts": settings.flag("norm_topk_prob", True),
        "expert_sum_epsilon": 1e-6,
    }


def _lfm2_moe_recipes(config: ModelConfig, names: StoredNames) -> Recipes:
    prefix = prefix_of(names)
    correction = {"router_correction": (f"{BLOCK}.expert_bias", identity)}
    return {
        **lfm2_recipes(config, names),
        **separate_experts(config, prefix, block=BLOCK, parts=("w1", "w3", "w2")),
        **expert_tensors(config, prefix, correction),
    }


LFM2_MOE = LFM2.like(
    "lfm2_moe",
    "LFM2, mixtures of experts",
    _read_lfm2_moe,
    recipes=_lfm2_moe_recipes,
    more_inert={"output_router_logits"},
)
