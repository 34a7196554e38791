"""ModernBERT: rotary positions, norms before layers, and windows in most of them."""

from prompt_tuning.checkpoints.stored_tensors import Recipe
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families import bert_layout, family, layer_settings, llama_layout
from prompt_tuning.families.class_labels import ClassLayers
from prompt_tuning.families.family import Family, Recipes, StoredNames
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.rotary_settings import (
    FULL,
    SLIDING,
    read_rotary,
    read_window_rotary,
)

PREFIX, TABLE = "model.", "embeddings.tok_embeddings.weight"
HEAD = {"dense": "head.dense", "norm": "head.norm", "logits": "decoder"}
NORM = "self_attention_norm/scale"


def _read_modernbert(settings: HuggingFaceSettings) -> ModelFields:
    reason = "that variant is not implemented"
    for name, value in (("norm_bias", False), ("decoder_bias", True)):
        settings.require(name, value, reason)
    settings.require("classifier_bias", False, reason)
    for name in ("rope_theta", "rope_scaling"):
        settings.require(
            name, None, "this family has one base for windows, and another"
        )
    settings.require("classifier_activation", "gelu", reason)
    settings.choose("classifier_pooling", ("cls", "mean"))
    width, heads = (
        settings.size("hidden_size", 768),
        settings.size("num_attention_heads", 12),
    )
    layers, period = (
        settings.layers("num_hidden_layers", 22),
        settings.size("global_attn_every_n_layers", 3),
    )
    head_width = settings.head_width(width, heads)
    kinds = [SLIDING if i % period else FULL for i in range(layers)]
    reach = settings.integer("local_attention", 128, minimum=2) // 2
    activation = settings.activation(settings.text("hidden_activation", "gelu"))
    first = settings.text("classifier_pooling", "cls") == "cls"
    return {
        **bert_layout.encoder_fields(activation),
        "vocabulary_size": settings.size("vocab_size", 50_368),
        "width": width,
        "feed_forward_width": settings.size("intermediate_size", 1152),
        "layers": layers,
        "heads": heads,
        "key_value_heads": heads,
        "head_width": head_width,
        "norm": "layer_scale",
        "norm_epsilon": settings.positive("norm_eps", 1e-5),
        "norm_placement": "before",
        "unnormed_first": True,
        "positions": "rotary",
        "maximum_positions": settings.size("max_position_embeddings", 8192),
        "gated": True,
        "biases": llama_layout.read_biases(settings),
        "pooling": "first" if first else "mean",
        "transform_activation": "gelu",
        "transform_bias": False,
        "tied_head": settings.flag("tie_word_embeddings", True),
        **read_rotary(
            settings, head_width, base=settings.positive("global_rope_theta", 160_000.0)
        ),
        **layer_settings.read_windows(settings, layers, kinds, window=reach),
        **read_window_rotary(settings, settings.positive("local_rope_theta", 10_000.0)),
    }


def _modernbert_recipes(config: ModelConfig, names: StoredNames) -> Recipes:
    fused = family.fused_parts("self_attention", family.QKV, "attn.Wqkv")
    fused |= family.fused_parts("mlp", family.GATED, "mlp.Wi")
    recipes = llama_layout.layout_recipes(
        config,
        names,
        fused=fused,
        modules={"self_attention/out": "attn.Wo", "mlp/down": "mlp.Wo"},
        norms={"self_attention_norm": "attn_norm", "mlp_norm": "mlp_norm"},
        base=PREFIX,
        table="embeddings.tok_embeddings",
        final_norm="final_norm",
        head="decoder.weight",
        outside={"embedding_norm/scale": "embeddings.norm.weight"},
    )
    norm = recipes[f"decoder/layers/{NORM}"]
    # The first layer has none; the model leaves out what is read in its place.
    instead = recipes["decoder/layers/mlp_norm/scale"].sources[0]
    sources = (instead, *norm.sources[1:])
    recipes[f"decoder/layers/{NORM}"] = Recipe(sources, True)
    return recipes | bert_layout.transform_recipes(config, HEAD)


MODERNBERT = Family(
    model_type="modernbert",
    title="ModernBERT",
    read_fields=_read_modernbert,
    recipes=_modernbert_recipes,
    embedding_tables=(PREFIX + TABLE, TABLE),
    base_prefix=PREFIX,
    head_name="decoder.weight",
    logit_bias=("decoder.bias",),
    class_layers=ClassLayers(
        "classifier",
        "head.dense",
        "head.norm",
        "gelu",
        bias=False,
        saved=False,
        token_dense=True,
    ),
    unread_modules=("head.dense", "decoder", "classifier"),
    inert={
        *("initializer_range", "initializer_cutoff_factor", "attention_dropout"),
        *("embedding_dropout", "mlp_dropout", "classifier_dropout"),
        *("deterministic_flash_attn", "sparse_prediction"),
        *("sparse_pred_ignore_index", "cls_token_id", "sep_token_id"),
    },
)
