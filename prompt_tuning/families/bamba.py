"""Bamba: Mamba-2, and attention in a few layers."""

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families import llama_layout, memory_layout
from prompt_tuning.families.expert_layout import ATTENTION
from prompt_tuning.families.family import Recipes, StoredNames
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.llama import LLAMA

NORMS = {"self_attention_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"}


def _read_bamba(settings: HuggingFaceSettings) -> ModelFields:
    fields = llama_layout.read_rotated(settings, epsilon=1e-5, partial=0.5)
    attention = settings.sequence("attn_layer_indices", [])
    linear = [i for i in range(fields["layers"]) if i not in attention]
    return {
        **fields,
        "biases": llama_layout.read_biases(settings),
        "key_value_heads": settings.size("num_key_value_heads", 8),
        **memory_layout.read_expanded(settings, linear, fields["width"]),
    }


def _bamba_recipes(config: ModelConfig, names: StoredNames) -> Recipes:
    feed_forward = {
        f"mlp/{x}": f"feed_forward.{x}_proj" for x in ("gate", "up", "down")
    }
    output = {"mamba2/output": "mamba.out_proj"} if config.recurrent_layers else {}
    return llama_layout.layout_recipes(
        config,
        names,
        modules=ATTENTION | feed_forward | output,
        norms=NORMS,
        final_norm="final_layernorm",
        fused=memory_layout.mamba2_parts(config),
        others=memory_layout.mamba2_tensors(config),
    )


BAMBA = LLAMA.like(
    "bamba",
    "Bamba",
    _read_bamba,
    recipes=_bamba_recipes,
    more_inert={"mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient"},
)
