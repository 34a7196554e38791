"""Hugging Face checkpoints: stored names to our paths, family by family.

The names are those of the modules in transformers 4 and 5, as they stand in
`model.safetensors`. Linear layers are stored `[out, in]` and transposed here, GPT-2's
`Conv1D` is stored `[in, out]`; norms and tables are alike on both sides.
"""

from collections.abc import Collection, Mapping

from prompt_tuning.checkpoints.formats.safetensors import open_safetensors
from prompt_tuning.checkpoints.stored_tensors import (
    FusedPart,
    Recipe,
    Transform,
    identity,
    layered,
    transpose,
)
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families.hf_config import T5_TABLES, read_config

__all__ = ["open_safetensors", "read_config", "recipes"]

LayerTable = Mapping[str, tuple[str, Transform]]

LLAMA_LAYER: LayerTable = {
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
LLAMA_QKV_BIASES: LayerTable = {
    "self_attention/query/bias": ("self_attn.q_proj.bias", identity),
    "self_attention/key/bias": ("self_attn.k_proj.bias", identity),
    "self_attention/value/bias": ("self_attn.v_proj.bias", identity),
}
LLAMA_OTHER_BIASES: LayerTable = {
    "self_attention/out/bias": ("self_attn.o_proj.bias", identity),
    "mlp/gate/bias": ("mlp.gate_proj.bias", identity),
    "mlp/up/bias": ("mlp.up_proj.bias", identity),
    "mlp/down/bias": ("mlp.down_proj.bias", identity),
}
GPT2_LAYER: LayerTable = {
    "self_attention_norm/scale": ("ln_1.weight", identity),
    "self_attention_norm/bias": ("ln_1.bias", identity),
    "self_attention/query/kernel": ("attn.c_attn.weight", FusedPart(0, 3)),
    "self_attention/key/kernel": ("attn.c_attn.weight", FusedPart(1, 3)),
    "self_attention/value/kernel": ("attn.c_attn.weight", FusedPart(2, 3)),
    "self_attention/query/bias": ("attn.c_attn.bias", FusedPart(0, 3)),
    "self_attention/key/bias": ("attn.c_attn.bias", FusedPart(1, 3)),
    "self_attention/value/bias": ("attn.c_attn.bias", FusedPart(2, 3)),
    "self_attention/out/kernel": ("attn.c_proj.weight", identity),
    "self_attention/out/bias": ("attn.c_proj.bias", identity),
    "mlp_norm/scale": ("ln_2.weight", identity),
    "mlp_norm/bias": ("ln_2.bias", identity),
    "mlp/up/kernel": ("mlp.c_fc.weight", identity),
    "mlp/up/bias": ("mlp.c_fc.bias", identity),
    "mlp/down/kernel": ("mlp.c_proj.weight", identity),
    "mlp/down/bias": ("mlp.c_proj.bias", identity),
}


def recipes(config: ModelConfig, names: Collection[str]) -> dict[str, Recipe]:
    """How each parameter of a model is made of the arrays of its checkpoint.

    Args:
      config: as `read_config` gives it; the family follows from its choices.
      names: those stored, as `open_safetensors` gives them. They tell whether the base
        model's prefix (`model.`, `transformer.`) was written.
    """
    if config.architecture == "encoder_decoder":
        return _t5(config, names)
    if config.positions == "learned":
        return _gpt2(config, names)
    return _llama(config, names)


def _stack(
    stack: str, pattern: str, layers: int, table: LayerTable
) -> dict[str, Recipe]:
    """One recipe for each row of a table; `pattern` has `{}` for the layer's number."""
    return {
        f"{stack}/layers/{path}": layered(pattern + name, layers, transform)
        for path, (name, transform) in table.items()
    }


def _head(config: ModelConfig) -> dict[str, Recipe]:
    return {} if config.tied_head else {"head/kernel": Recipe(("lm_head.weight",))}


def _llama(config: ModelConfig, names: Collection[str]) -> dict[str, Recipe]:
    prefix = "" if "embed_tokens.weight" in names else "model."
    table = dict(LLAMA_LAYER)
    if config.biases != "none":
        table |= LLAMA_QKV_BIASES
    if config.biases == "all":
        table |= LLAMA_OTHER_BIASES
    return {
        "token_embedder/embedding": Recipe((f"{prefix}embed_tokens.weight",)),
        **_stack("decoder", f"{prefix}layers.{{}}.", config.layers, table),
        "decoder/final_norm/scale": Recipe((f"{prefix}norm.weight",)),
        **_head(config),
    }


def _gpt2(config: ModelConfig, names: Collection[str]) -> dict[str, Recipe]:
    prefix = "" if "wte.weight" in names else "transformer."
    return {
        "token_embedder/embedding": Recipe((f"{prefix}wte.weight",)),
        "position_embedder/embedding": Recipe((f"{prefix}wpe.weight",)),
        **_stack("decoder", f"{prefix}h.{{}}.", config.layers, GPT2_LAYER),
        "decoder/final_norm/scale": Recipe((f"{prefix}ln_f.weight",)),
        "decoder/final_norm/bias": Recipe((f"{prefix}ln_f.bias",)),
        **_head(config),
    }


def _t5(config: ModelConfig, names: Collection[str]) -> dict[str, Recipe]:
    # Of the shared table some files keep only the encoder's or the decoder's name.
    shared = next((name for name in T5_TABLES if name in names), T5_TABLES[0])
    return {
        "token_embedder/embedding": Recipe((shared,)),
        **_t5_stack("encoder", config.encoder_layers, config.gated),
        **_t5_stack("decoder", config.layers, config.gated),
        **_head(config),
    }


def _t5_stack(stack: str, layers: int, gated: bool) -> dict[str, Recipe]:
    mlp_layer = 1 if stack == "encoder" else 2
    table = _t5_attention("self_attention", "layer.0.", "SelfAttention")
    if stack == "decoder":
        table |= _t5_attention("cross_attention", "layer.1.", "EncDecAttention")
    mlp = f"layer.{mlp_layer}.DenseReluDense"
    table["mlp_norm/scale"] = (f"layer.{mlp_layer}.layer_norm.weight", identity)
    if gated:
        table["mlp/gate/kernel"] = (f"{mlp}.wi_0.weight", transpose)
    table["mlp/up/kernel"] = (f"{mlp}.{'wi_1' if gated else 'wi'}.weight", transpose)
    table["mlp/down/kernel"] = (f"{mlp}.wo.weight", transpose)
    bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return {
        **_stack(stack, f"{stack}.block.{{}}.", layers, table),
        f"{stack}/relative_position_bias/embedding": Recipe((bias,), False, transpose),
        f"{stack}/final_norm/scale": Recipe((f"{stack}.final_layer_norm.weight",)),
    }


def _t5_attention(ours: str, layer: str, theirs: str) -> dict:
    projections = {"query": "q", "key": "k", "value": "v", "out": "o"}
    return {
        f"{ours}_norm/scale": (f"{layer}layer_norm.weight", identity),
        **{
            f"{ours}/{name}/kernel": (f"{layer}{theirs}.{letter}.weight", transpose)
            for name, letter in projections.items()
        },
    }
