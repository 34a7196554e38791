"""Qwen 3.5 with experts, text models; one expert processes every token."""

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families import expert_layout
from prompt_tuning.families.family import Recipes, StoredNames
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.qwen2_moe import shared_experts
from prompt_tuning.families.qwen3_5 import QWEN3_5_TEXT, qwen3_5_recipes, read_qwen3_5

ROUTER = "mlp.gate.weight"
INWARD, OUTWARD = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def read_qwen3_5_moe(settings: HuggingFaceSettings) -> ModelFields:
    """Returns fields of `ModelConfig`; see `Family.read_fields`."""
    fields = read_qwen3_5(
        settings, "moe_intermediate_size"
    ) | expert_layout.read_experts(settings)
    shared = settings.size("shared_expert_intermediate_size")
    return fields | {"shared_expert_width": shared}


def qwen3_5_moe_recipes(
    config: ModelConfig,
    names: StoredNames,
    *,
    prefix: str | None = None,
    head: str = "lm_head.weight",
) -> Recipes:
    """Returns the recipes of all parameters; takes the arguments of `qwen3_5_recipes`.

    Published folders store experts together, folders from transformers separately.
    """
    start = expert_layout.prefix_of(names) if prefix is None else prefix
    experts = (
        expert_layout.fused_experts(config, start, ROUTER, INWARD, OUTWARD)
        if f"{start}layers.0.{INWARD}" in names
        else expert_layout.separate_experts(config, start)
    )
    recipes = qwen3_5_recipes(config, names, prefix=prefix, head=head)
    return recipes | experts | shared_experts(config, start)


QWEN3_5_MOE_TEXT = QWEN3_5_TEXT.like(
    "qwen3_5_moe_text",
    "Qwen 3.5, text models with experts",
    read_qwen3_5_moe,
    recipes=qwen3_5_moe_recipes,
    more_inert=expert_layout.BALANCING,
)
