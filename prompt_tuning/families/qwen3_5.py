"""Qwen 3.5, text models: layers with the gated delta rule, and with gated attention."""

from collections.abc import Mapping

from prompt_tuning.checkpoints.stored_tensors import FusedPart, identity
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families import expert_layout, family, layer_settings, llama_layout
from prompt_tuning.families.family import Family, LayerNames, Recipes, StoredNames
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.memory_layout import LINEAR, memory_shares, tap_names
from prompt_tuning.families.rotary_settings import FULL

OUTPUT = {"gated_delta/output": "linear_attn.out_proj"}
DELTA = OUTPUT | {
    "gated_delta/gate": "linear_attn.in_proj_z",
    "gated_delta/strength": "linear_attn.in_proj_b",
    "gated_delta/decay": "linear_attn.in_proj_a",
}
OTHERS = {
    "gated_delta/decay_bias": ("linear_attn.dt_bias", identity),
    "gated_delta/decay_rate": ("linear_attn.A_log", identity),
    "gated_delta/norm_scale": ("linear_attn.norm.weight", identity),
}


def read_qwen3_5(
    settings: HuggingFaceSettings, feed_forward: str = "intermediate_size"
) -> ModelFields:
    """Returns fields of `ModelConfig`; see `Family.read_fields`.

    `feed_forward` names the setting for the width of feed-forward layers.
    """
    fields = llama_layout.read_rotated(
        settings, head_width=256, feed_forward=feed_forward, partial=0.25
    )
    settings.require("attention_bias", False, "biases are not implemented")
    settings.require("hidden_act", "silu", "the convolution has SiLU")
    return {
        **fields,
        "norm": "rms_plus_one",
        "query_key_norm": "head",
        "gated_attention": True,
        **read_delta_layers(settings, fields["layers"]),
    }


def read_delta_layers(settings: HuggingFaceSettings, layers: int) -> ModelFields:
    """Reads which layers have the gated delta rule, and its sizes.

    Raises:
      InputError: for another kind of layer.
    """
    period = settings.size("full_attention_interval", 4)
    default = [LINEAR if (i + 1) % period else FULL for i in range(layers)]
    numbers = layer_settings.read_layers(settings, layers, default, LINEAR)
    sizes = {
        "convolution_width": settings.integer("linear_conv_kernel_dim", 4, minimum=2),
        "recurrent_heads": settings.size("linear_num_value_heads", 32),
        "recurrent_key_heads": settings.size("linear_num_key_heads", 16),
        "recurrent_width": settings.size("linear_value_head_dim", 128),
        "recurrent_key_width": settings.size("linear_key_head_dim", 128),
    }
    if not numbers:
        return {}
    return {"recurrence": "gated_delta", "recurrent_layers": numbers, **sizes}


def qwen3_5_recipes(
    config: ModelConfig,
    names: StoredNames,
    *,
    prefix: str | None = None,
    head: str = "lm_head.weight",
    fused: Mapping[str, tuple[str, FusedPart]] | None = None,
) -> Recipes:
    """Returns the recipes of all parameters except for experts.

    For `prefix` and `head` see `layout_recipes`. `fused` has module and part of the
    gated delta rule's projections except the output, if not as in Qwen 3.5.
    """
    parts = (
        FusedPart(i, (1, 1), config.heads, in_first=False)  # of each head
        for i in range(2)
    )
    both = ("self_attention/query", "self_attention/query_gate")
    queries = {
        path: ("self_attn.q_proj", part) for path, part in zip(both, parts, strict=True)
    }
    some = bool(config.recurrent_layers)
    delta = OUTPUT if fused else DELTA
    fused = fused or _delta_parts(config, "linear_attn.in_proj_qkv")
    return llama_layout.layout_recipes(
        config,
        names,
        prefix=prefix,
        head=head,
        modules={
            **expert_layout.ATTENTION,
            **expert_layout.feed_forward_modules(config),
            **(delta if some else {}),
        },
        fused={**queries, **(fused if some else {})},
        others=_delta_tensors(config),
    )


def _delta_parts(config: ModelConfig, module: str) -> dict[str, tuple[str, FusedPart]]:
    """Returns the parts of a module with all queries, then keys, then values."""
    return family.fused_parts(
        "gated_delta", family.QKV, module, memory_shares(config, family.QKV)
    )


def _delta_tensors(config: ModelConfig) -> LayerNames:
    """Returns a layer's tensors other than projections, in models with such layers."""
    if not config.recurrent_layers:
        return {}
    return OTHERS | tap_names(config, "linear_attn.conv1d", family.QKV)


QWEN3_5_TEXT = Family(
    model_type="qwen3_5_text",
    title="Qwen 3.5, dense text models",
    read_fields=read_qwen3_5,
    recipes=qwen3_5_recipes,
    embedding_tables=llama_layout.TABLES,
    base_prefix=llama_layout.PREFIX,
    inert=llama_layout.INERT - {"pretraining_tp"},
)
