"""Granite 4: Mamba-2 and attention, with experts or without."""

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families import memory_layout
from prompt_tuning.families.expert_layout import (
    ATTENTION,
    fused_experts,
    prefix_of,
    read_experts,
)
from prompt_tuning.families.family import GATED, Recipes, StoredNames, fused_parts
from prompt_tuning.families.granite import GRANITE
from prompt_tuning.families.granitemoe import FUSED, GRANITEMOE
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.llama_layout import layout_recipes


def _read_granitemoehybrid(settings: HuggingFaceSettings) -> ModelFields:
    fields = GRANITE.read_fields(settings)
    kinds = memory_layout.read_kinds(settings, fields["layers"])
    linear = [i for i, kind in enumerate(kinds) if kind == memory_layout.LINEAR]
    shared = settings.size("shared_intermediate_size", 1024)
    if settings.integer("num_local_experts", 8, minimum=0):
        experts = read_experts(settings, "num_local_experts")
        experts |= {"shared_expert_width": shared, "shared_expert_gated": False}
    else:
        experts = {"feed_forward_width": shared}
    # Published folders have "nope", those that transformers 5 writes null.
    settings.choose("position_embedding_type", ("rope", "nope"))
    rotary = settings.value("position_embedding_type", "nope") == "rope"
    return {
        **fields,
        **experts,
        "positions": "rotary" if rotary else "none",
        **memory_layout.read_expanded(settings, linear, fields["width"]),
    }


def _granitemoehybrid_recipes(config: ModelConfig, names: StoredNames) -> Recipes:
    part = "mlp/shared" if config.experts else "mlp"
    parts = fused_parts(part, GATED, "shared_mlp.input_linear")
    output = {"mamba2/output": "mamba.out_proj"} if config.recurrent_layers else {}
    experts = fused_experts(config, prefix_of(names), **FUSED) if config.experts else {}
    return experts | layout_recipes(
        config,
        names,
        modules=ATTENTION | {f"{part}/down": "shared_mlp.output_linear"} | output,
        fused=parts | memory_layout.mamba2_parts(config),
        others=memory_layout.mamba2_tensors(config),
    )


GRANITEMOEHYBRID = GRANITEMOE.like(
    "granitemoehybrid",
    "Granite 4, hybrid",
    _read_granitemoehybrid,
    recipes=_granitemoehybrid_recipes,
    more_inert={"mamba_chunk_size"},
)
