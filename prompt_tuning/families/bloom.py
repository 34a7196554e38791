"""BLOOM: ALiBi, a norm of the embeddings, and projections fused per head."""

from typing import Any

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families.class_labels import ClassLayers
from prompt_tuning.families.family import Family, Recipes, StoredNames, fused_in_groups
from prompt_tuning.families.gpt_neox import NORMS
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.llama_layout import layout_recipes

PREFIX = "transformer."
OUTSIDE: dict[str, Any] = {
    "base": PREFIX,
    "table": "word_embeddings",
    "layers": "h",
    "final_norm": "ln_f",
}
"""Names outside of the layers; see `layout_recipes`."""
EMBEDDING_NORM = {
    "embedding_norm/scale": "word_embeddings_layernorm.weight",
    "embedding_norm/bias": "word_embeddings_layernorm.bias",
}
QKV = "self_attention.query_key_value"
PROJECTIONS = {
    "self_attention/out": "self_attention.dense",
    "mlp/up": "mlp.dense_h_to_4h",
    "mlp/down": "mlp.dense_4h_to_h",
}


def _read_bloom(settings: HuggingFaceSettings) -> ModelFields:
    reason = "residual connections after the norm are not implemented"
    settings.require("apply_residual_connection_post_layernorm", False, reason)
    width = settings.size("n_embed" if "n_embed" in settings else "hidden_size")
    heads = settings.size(
        "num_attention_heads" if "num_attention_heads" in settings else "n_head"
    )
    return {
        "architecture": "decoder_only",
        "vocabulary_size": settings.size("vocab_size"),
        "width": width,
        "feed_forward_width": 4 * width,
        "layers": settings.layers(
            "num_hidden_layers" if "num_hidden_layers" in settings else "n_layer"
        ),
        "heads": heads,
        "key_value_heads": heads,
        "head_width": settings.head_width(width, heads),
        "norm": "layer",
        "norm_epsilon": settings.positive("layer_norm_epsilon", 1e-5),
        "positions": "alibi",
        "embedding_norm": True,
        "activation": "gelu_tanh",
        "gated": False,
        "biases": "all",
        "tied_head": settings.flag("tie_word_embeddings", True),
    }


def _bloom_recipes(config: ModelConfig, names: StoredNames) -> Recipes:
    fused = fused_in_groups(config, QKV)
    return layout_recipes(
        config,
        names,
        fused=fused,
        modules=PROJECTIONS,
        norms=NORMS,
        outside=EMBEDDING_NORM,
        **OUTSIDE,
    )


BLOOM = Family(
    model_type="bloom",
    title="BLOOM, BLOOMZ",
    read_fields=_read_bloom,
    recipes=_bloom_recipes,
    embedding_tables=("transformer.word_embeddings.weight", "word_embeddings.weight"),
    base_prefix=PREFIX,
    class_layers=ClassLayers(token_rows="classifier"),
    inert={
        *("hidden_dropout", "attention_dropout", "initializer_range", "use_cache"),
        *("pretraining_tp", "slow_but_exact"),  # how sums are computed
    },
)
