"""Llama 1 to 3, and models with its architecture.

Linear layers are stored `[out, in]`, as in all models of transformers but GPT-2.
"""

from collections.abc import Collection
from typing import Any

from prompt_tuning.checkpoints.stored_tensors import Recipe, identity, transpose
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.model_config import ModelConfig, RotaryScaling
from prompt_tuning.families.family import (
    Family,
    LayerNames,
    head_recipe,
    layer_recipes,
    token_settings,
)
from prompt_tuning.families.hf_settings import HuggingFaceSettings, activation_setting

PREFIX = "model."
LAYER: LayerNames = {
    "self_attention_norm/scale": ("input_layernorm.weight", identity),
    "self_attention/query/kernel": ("self_attn.q_proj.weight", transpose),
    "self_attention/key/kernel": ("self_attn.k_proj.weight", transpose),
    "self_attention/value/kernel": ("self_attn.v_proj.weight", transpose),
    "self_attention/out/kernel": ("self_attn.o_proj.weight", transpose),
    "mlp_norm/scale": ("post_attention_layernorm.weight", identity),
    "mlp/gate/kernel": ("mlp.gate_proj.weight", transpose),
    "mlp/up/kernel": ("mlp.up_proj.weight", transpose),
    "mlp/down/kernel": ("mlp.down_proj.weight", transpose),
}
QKV_BIASES: LayerNames = {
    "self_attention/query/bias": ("self_attn.q_proj.bias", identity),
    "self_attention/key/bias": ("self_attn.k_proj.bias", identity),
    "self_attention/value/bias": ("self_attn.v_proj.bias", identity),
}
OTHER_BIASES: LayerNames = {
    "self_attention/out/bias": ("self_attn.o_proj.bias", identity),
    "mlp/gate/bias": ("mlp.gate_proj.bias", identity),
    "mlp/up/bias": ("mlp.up_proj.bias", identity),
    "mlp/down/bias": ("mlp.down_proj.bias", identity),
}


def read_llama(settings: HuggingFaceSettings) -> dict[str, Any]:
    """Returns fields of `ModelConfig`.

    Raises:
      InputError: for a missing setting or an unsupported choice.
    """
    attention_bias = settings.flag("attention_bias", False)
    if attention_bias != settings.flag("mlp_bias", False):
        raise InputError(
            f"{settings.source} has only one of attention_bias and mlp_bias; "
            "expected both or neither"
        )
    heads = settings.size("num_attention_heads")
    width = settings.size("hidden_size")
    return {
        "architecture": "decoder_only",
        "vocabulary_size": settings.size("vocab_size"),
        "width": width,
        "feed_forward_width": settings.size("intermediate_size"),
        "layers": settings.layers("num_hidden_layers"),
        "heads": heads,
        "key_value_heads": settings.size("num_key_value_heads", heads),
        "head_width": settings.size("head_dim", width // heads),
        "norm": "rms",
        "norm_epsilon": settings.positive("rms_norm_eps", 1e-6),
        "positions": "rotary",
        "maximum_positions": settings.integer("max_position_embeddings", minimum=1),
        **_rotary(settings),
        "activation": settings.activation(settings.text("hidden_act", "silu")),
        "gated": True,
        "biases": "all" if attention_bias else "none",
        "tied_head": settings.flag("tie_word_embeddings", False),
    }


def _rotary(settings: HuggingFaceSettings) -> dict[str, Any]:
    """Base and scaling, from `rope_parameters` (transformers 5) or older settings."""
    base, scaling = settings.positive("rope_theta", 10_000.0), None
    settings.require(
        "partial_rotary_factor", 1.0, "partial rotary positions are not implemented"
    )
    for name in ("rope_scaling", "rope_parameters"):
        rope = HuggingFaceSettings(
            f"{name} in {settings.source}", settings.nested(name, {}).values
        )
        base = rope.positive("rope_theta", base)
        scaling = _rotary_scaling(rope) or scaling
    return {"rotary_base": base, "rotary_scaling": scaling}


def _rotary_scaling(rope: HuggingFaceSettings) -> RotaryScaling | None:
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return None
    source = rope.source
    rope = HuggingFaceSettings(f"the rope_type {shown(kind)} in {source}", rope.values)
    if kind == "linear":
        return RotaryScaling(factor=rope.positive("factor"))
    if kind == "llama3":
        low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
        if low >= high:
            rope.refuse("high_freq_factor", f"more than low_freq_factor, {low:g}")
        return RotaryScaling(
            factor=rope.positive("factor"),
            low_frequency_factor=low,
            high_frequency_factor=high,
            original_positions=rope.integer(
                "original_max_position_embeddings", minimum=1
            ),
        )
    raise InputError(
        f"{source} has the rope_type {shown(kind)}, expected 'default', 'linear' "
        "or 'llama3'; others are not implemented"
    )


def llama_recipes(config: ModelConfig, names: Collection[str]) -> dict[str, Recipe]:
    """Returns the recipes of all parameters; see `Family.recipes`."""
    prefix = "" if "embed_tokens.weight" in names else PREFIX
    layer = dict(LAYER)
    if config.biases != "none":
        layer |= QKV_BIASES
    if config.biases == "all":
        layer |= OTHER_BIASES
    return {
        "token_embedder/embedding": Recipe((f"{prefix}embed_tokens.weight",)),
        **layer_recipes("decoder", f"{prefix}layers.{{}}.", config.layers, layer),
        "decoder/final_norm/scale": Recipe((f"{prefix}norm.weight",)),
        **head_recipe(config),
    }


def llama_settings(config: ModelConfig) -> dict[str, Any]:
    """Returns `config.json`, as `transformers.LlamaConfig` reads it."""
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocabulary_size,
        "hidden_size": config.width,
        "intermediate_size": config.feed_forward_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_value_heads,
        "head_dim": config.head_width,
        "hidden_act": activation_setting(config.activation),
        "max_position_embeddings": config.maximum_positions,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rotary_base,
        "attention_bias": config.biases == "all",
        "mlp_bias": config.biases == "all",
        "tie_word_embeddings": config.tied_head,
        **token_settings(config),
    }
    scaling = config.rotary_scaling
    if scaling is not None and scaling.high_frequency_factor == 0:
        settings["rope_scaling"] = {"rope_type": "linear", "factor": scaling.factor}
    elif scaling is not None:
        settings["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_positions,
        }
    return settings


LLAMA = Family(
    model_type="llama",
    read_fields=read_llama,
    recipes=llama_recipes,
    write_settings=llama_settings,
    embedding_tables=("model.embed_tokens.weight", "embed_tokens.weight"),
    base_prefix=PREFIX,
)
