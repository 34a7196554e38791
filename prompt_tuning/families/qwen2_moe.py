"""Qwen 1.5 and 2 with experts; one expert processes every token."""

from prompt_tuning.checkpoints.stored_tensors import transpose
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families import expert_layout, layer_settings, llama_layout
from prompt_tuning.families.family import Recipes, StoredNames
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.llama import LLAMA
from prompt_tuning.families.rotary_settings import FULL, SLIDING

SHARED = {
    f"shared/{name}/kernel": (f"mlp.shared_expert.{name}_proj.weight", transpose)
    for name in ("gate", "up", "down")
} | {"shared_gate/kernel": ("mlp.shared_expert_gate.weight", transpose)}


def _read_qwen2_moe(settings: HuggingFaceSettings) -> ModelFields:
    fields = llama_layout.read_rotated(settings)
    layers, last = fields["layers"], 0
    if settings.flag("use_sliding_window", False):
        last = settings.integer("max_window_layers", 28, minimum=0)
    kinds = [FULL if i % 2 or i >= last else SLIDING for i in range(layers)]
    return {
        **fields,
        **layer_settings.read_windows(settings, layers, kinds),
        **expert_layout.read_experts(settings),
        **expert_layout.read_dense_layers(settings),
        "feed_forward_width": settings.size("moe_intermediate_size"),
        "shared_expert_width": settings.size("shared_expert_intermediate_size"),
        "biases": "qkv" if settings.flag("qkv_bias", True) else "none",
        "normalize_experts": settings.flag("norm_topk_prob", False),
    }


def _qwen2_moe_recipes(config: ModelConfig, names: StoredNames) -> Recipes:
    return expert_layout.expert_recipes(config, names) | shared_experts(
        config, expert_layout.prefix_of(names)
    )


def shared_experts(config: ModelConfig, prefix: str) -> Recipes:
    """Returns the recipes of experts that process every token, and of their scores."""
    return expert_layout.expert_tensors(config, prefix, SHARED)


QWEN2_MOE = LLAMA.like(
    "qwen2_moe",
    "Qwen 1.5 and 2, mixtures of experts",
    _read_qwen2_moe,
    recipes=_qwen2_moe_recipes,
    more_inert=expert_layout.BALANCING,
)
