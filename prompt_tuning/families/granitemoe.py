"""Granite 3 with experts."""

import functools

from prompt_tuning.families import expert_layout
from prompt_tuning.families.granite import GRANITE
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields

FUSED = {
    "router": "block_sparse_moe.router.layer.weight",
    "inward": "block_sparse_moe.input_linear.weight",
    "outward": "block_sparse_moe.output_linear.weight",
}
"""Tensors of the router and the experts of a layer."""


def _read_granitemoe(settings: HuggingFaceSettings) -> ModelFields:
    fields = GRANITE.read_fields(settings)
    return fields | expert_layout.read_experts(settings, "num_local_experts")


GRANITEMOE = GRANITE.like(
    "granitemoe",
    "Granite 3, mixtures of experts",
    _read_granitemoe,
    recipes=functools.partial(expert_layout.fused_expert_recipes, **FUSED),
    more_inert=expert_layout.BALANCING,
)
