"""Qwen 3.5, text models: layers of the gated delta rule, and of gated attention."""

from collections.abc import Collection
from typing import Any

from prompt_tuning.checkpoints.stored_tensors import FusedPart, Recipe, identity
from prompt_tuning.checkpoints.tap_tensors import taps_first
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families.family import Family
from prompt_tuning.families.hf_settings import HuggingFaceSettings
from prompt_tuning.families.llama_layout import (
    INERT,
    PREFIX,
    PROJECTIONS,
    TABLES,
    layout_recipes,
    read_layout,
)
from prompt_tuning.families.rotary_settings import FULL, read_rotary

LINEAR = "linear_attention"
MODULES = PROJECTIONS | {
    "gated_delta/input": "linear_attn.in_proj_qkv",
    "gated_delta/gate": "linear_attn.in_proj_z",
    "gated_delta/strength": "linear_attn.in_proj_b",
    "gated_delta/decay": "linear_attn.in_proj_a",
    "gated_delta/output": "linear_attn.out_proj",
}
OTHERS = {
    "gated_delta/taps": ("linear_attn.conv1d.weight", taps_first),
    "gated_delta/decay_bias": ("linear_attn.dt_bias", identity),
    "gated_delta/decay_rate": ("linear_attn.A_log", identity),
    "gated_delta/norm_scale": ("linear_attn.norm.weight", identity),
}


def read_qwen3_5(settings: HuggingFaceSettings) -> dict[str, Any]:
    """Returns fields of `ModelConfig`.

    Raises:
      InputError: for a missing setting or an unsupported choice.
    """
    fields = read_layout(settings, head_width=256)
    settings.require("attention_bias", False, "biases are not implemented")
    settings.require("hidden_act", "silu", "the convolution has SiLU")
    return (
        fields
        | read_rotary(settings, fields["head_width"], partial=0.25)
        | {"norm": "rms_plus_one", "query_key_norm": "head", "gated_attention": True}
        | read_delta_layers(settings, fields["layers"])
    )


def read_delta_layers(settings: HuggingFaceSettings, layers: int) -> dict[str, Any]:
    """Reads which layers have the gated delta rule, and its sizes.

    Raises:
      InputError: for another kind of layer.
    """
    period = settings.size("full_attention_interval", 4)
    default = [LINEAR if (i + 1) % period else FULL for i in range(layers)]
    kinds = settings.sequence("layer_types", default)
    if len(kinds) != layers or not set(map(str, kinds)) <= {FULL, LINEAR}:
        expected = f"a list of {layers} texts, each {FULL!r} or {LINEAR!r}"
        settings.refuse("layer_types", expected)
    sizes = {
        "convolution_width": settings.integer("linear_conv_kernel_dim", 4, minimum=2),
        "recurrent_heads": settings.size("linear_num_value_heads", 32),
        "recurrent_key_heads": settings.size("linear_num_key_heads", 16),
        "recurrent_width": settings.size("linear_value_head_dim", 128),
        "recurrent_key_width": settings.size("linear_key_head_dim", 128),
    }
    numbers = tuple(i for i, kind in enumerate(kinds) if kind == LINEAR)
    if not numbers:
        return {}
    return {"recurrence": "gated_delta", "recurrent_layers": numbers, **sizes}


def qwen3_5_recipes(
    config: ModelConfig,
    names: Collection[str],
    *,
    prefix: str | None = None,
    head: str = "lm_head.weight",
) -> dict[str, Recipe]:
    """Returns the recipes of all parameters; see `Family.recipes`.

    Args:
      config: config of the model.
      names: names of the stored tensors.
      prefix: as of `layout_recipes`.
      head: as of `layout_recipes`.
    """
    parts = (
        FusedPart(i, (1, 1), config.heads, in_first=False)  # of each head
        for i in range(2)
    )
    both = ("self_attention/query", "self_attention/query_gate")
    modules = {
        path: module
        for path, module in MODULES.items()
        if config.recurrent_layers or not path.startswith("gated_delta/")
    }
    return layout_recipes(
        config,
        names,
        prefix=prefix,
        head=head,
        modules=modules,
        fused={
            path: ("self_attn.q_proj", part)
            for path, part in zip(both, parts, strict=True)
        },
        others=OTHERS if config.recurrent_layers else None,
    )


QWEN3_5_TEXT = Family(
    model_type="qwen3_5_text",
    title="Qwen 3.5, dense text models",
    read_fields=read_qwen3_5,
    recipes=qwen3_5_recipes,
    embedding_tables=TABLES,
    base_prefix=PREFIX,
    inert=INERT - {"pretraining_tp"},
)
