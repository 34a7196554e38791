"""BART: an encoder-decoder with learned positions and a norm after each sum.

Positions are counted from 2, as in OPT. `final_logits_bias` is a bias of the head.
Families close to BART share its names, but have other positions and norms elsewhere.
"""

from prompt_tuning.checkpoints.stored_tensors import (
    Recipe,
    RowsFrom,
    Transform,
    flattened,
)
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families import family
from prompt_tuning.families.class_labels import ClassLayers
from prompt_tuning.families.family import Family, Recipes, StoredNames
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields

PREFIX = "model."
FIRST_POSITION = 2
LOGIT_BIAS = "final_logits_bias"
TABLES = tuple(
    f"{prefix}{name}.weight"
    for prefix in (PREFIX, "")
    for name in ("shared", "encoder.embed_tokens", "decoder.embed_tokens")
)
ATTENTION = {"self_attention": "self_attn", "cross_attention": "encoder_attn"}
PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}
SIZES = {
    "encoder_attention_heads": "decoder_attention_heads",
    "encoder_ffn_dim": "decoder_ffn_dim",
}


def _read_bart(settings: HuggingFaceSettings) -> ModelFields:
    settings.require("normalize_before", False, "that variant is not implemented")
    return read_stacks(settings) | {
        "norm_placement": "after_sum",
        "positions": "learned",
        "embedding_norm": True,
        "decoder_start_id": settings.integer("decoder_start_token_id", 2),
        "encoder_input": "bos_text_eos",
    }


def read_stacks(
    settings: HuggingFaceSettings, *, activation: str = "gelu", scaled: bool = False
) -> ModelFields:
    """Returns the fields of `ModelConfig` that BART shares with families close to it.

    `activation` and `scaled` (whether token vectors are scaled) are the defaults of
    settings.
    """
    for encoder, decoder in SIZES.items():
        reason = f"an encoder of another {encoder} is not implemented"
        settings.require(decoder, settings.size(encoder), reason)
    reason = "separate tables of encoder, decoder and head are not implemented"
    settings.require("tie_word_embeddings", True, reason)
    width = settings.size("d_model")
    heads = settings.size("encoder_attention_heads")
    scaled = settings.flag("scale_embedding", scaled)
    return {
        "architecture": "encoder_decoder",
        "vocabulary_size": settings.size("vocab_size"),
        "width": width,
        "feed_forward_width": settings.size("encoder_ffn_dim"),
        "layers": settings.layers("decoder_layers"),
        "encoder_layers": settings.layers("encoder_layers"),
        "heads": heads,
        "key_value_heads": heads,
        "head_width": settings.head_width(width, heads),
        "norm": "layer",
        "norm_epsilon": 1e-5,
        "maximum_positions": settings.size("max_position_embeddings"),
        "embedding_multiplier": width**0.5 if scaled else 1.0,
        "activation": settings.activation(
            settings.text("activation_function", activation)
        ),
        "gated": False,
        "biases": "all",
        "tied_head": True,
        "encoder_input": "text_eos",
    }


def _bart_recipes(config: ModelConfig, names: StoredNames) -> Recipes:
    table = next((name for name in TABLES if name in names), TABLES[0])
    prefix = PREFIX if table.startswith(PREFIX) else ""
    head = {"head/bias": Recipe((LOGIT_BIAS,), transform=flattened)}
    return {
        "token_embedder/embedding": Recipe((table,)),
        **_stack_recipes("encoder", config.encoder_layers, config, prefix),
        **_stack_recipes("decoder", config.layers, config, prefix),
        **(head if config.head_bias else {}),
    }


def _stack_recipes(
    stack: str, layers: int, config: ModelConfig, prefix: str
) -> Recipes:
    modules = {"mlp/up": "fc1", "mlp/down": "fc2"}
    place = "out_norm" if config.norm_placement == "after_sum" else "norm"
    norms = {f"mlp_{place}": "final_layer_norm"}
    for ours, theirs in ATTENTION.items():
        if stack == "encoder" and ours == "cross_attention":
            continue
        norms[f"{ours}_{place}"] = f"{theirs}_layer_norm"
        for name, projection in PROJECTIONS.items():
            modules[f"{ours}/{name}"] = f"{theirs}.{projection}"
    names = family.norm_names(config, norms) | family.projection_names(config, modules)
    inputs: dict[str, tuple[str, Transform]] = {}
    if config.embedding_norm:
        inputs |= family.norm_names(config, {"embedding_norm": "layernorm_embedding"})
    if config.positions == "learned":
        table = ("embed_positions.weight", RowsFrom(FIRST_POSITION))
        inputs["position_embedder/embedding"] = table
    after = config.norm_placement == "after_sum"
    final = (
        {}
        if after
        else family.final_norm_recipes(config, stack, f"{prefix}{stack}.layer_norm")
    )
    return {
        **family.layer_recipes(stack, f"{prefix}{stack}.layers.{{}}.", layers, names),
        **{
            f"{stack}_inputs/{ours}": Recipe((f"{prefix}{stack}.{name}",), False, part)
            for ours, (name, part) in inputs.items()
        },
        **final,
    }


BART = Family(
    model_type="bart",
    title="BART",
    read_fields=_read_bart,
    recipes=_bart_recipes,
    embedding_tables=TABLES,
    class_layers=ClassLayers(
        "classification_head.out_proj", "classification_head.dense"
    ),
    base_prefix=PREFIX,
    logit_bias=(LOGIT_BIAS,),
    inert={
        *("dropout", "attention_dropout", "activation_dropout", "init_std"),
        *("encoder_layerdrop", "decoder_layerdrop", "classifier_dropout"),
        *("use_cache", "is_encoder_decoder", "is_decoder"),
        # It ends what transformers generates at its maximum length.
        "forced_eos_token_id",
    },
)
