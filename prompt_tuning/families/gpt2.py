"""GPT-2: stores linear layers as `[in, out]`, with query, key and value fused."""

from typing import Any

from prompt_tuning.checkpoints.stored_tensors import FusedPart, identity
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families import family, hf_settings, llama_layout
from prompt_tuning.families.class_labels import ClassLayers
from prompt_tuning.families.family import Family, Recipes, StoredNames
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields

PREFIX = "transformer."
SUMMARY = ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")
PROJECTIONS = {
    "self_attention/out": "attn.c_proj",
    "mlp/up": "mlp.c_fc",
    "mlp/down": "mlp.c_proj",
}
FUSED = {
    f"self_attention/{name}": ("attn.c_attn", FusedPart(i, (1, 1, 1)))
    for i, name in enumerate(("query", "key", "value"))
}
OUTSIDE: dict[str, Any] = {
    "base": PREFIX,
    "table": "wte",
    "layers": "h",
    "final_norm": "ln_f",
}
"""Names outside of the layers; see `layout_recipes`."""
POSITIONS = {"position_embedder/embedding": "wpe.weight"}
NORMS = {"self_attention_norm": "ln_1", "mlp_norm": "ln_2"}


def _read_gpt2(settings: HuggingFaceSettings) -> ModelFields:
    reason = "that variant of GPT-2 is not implemented"
    settings.require("scale_attn_by_inverse_layer_idx", False, reason)
    settings.require("add_cross_attention", False, reason)
    return read_gpt2_layout(settings) | {
        "positions": "learned",
        "biases": "all",
        "tied_head": settings.flag("tie_word_embeddings", True),
        "scale_scores": settings.flag("scale_attn_weights", True),
    }


def read_gpt2_layout(settings: HuggingFaceSettings) -> ModelFields:
    """Returns the fields of `ModelConfig` from settings with GPT-2's names."""
    width, heads = settings.size("n_embd"), settings.size("n_head")
    activation = settings.text("activation_function", "gelu_new")
    return {
        "architecture": "decoder_only",
        "vocabulary_size": settings.size("vocab_size"),
        "width": width,
        "feed_forward_width": settings.size("n_inner", 4 * width),
        "layers": settings.layers("n_layer"),
        "heads": heads,
        "key_value_heads": heads,
        "head_width": settings.head_width(width, heads),
        "norm": "layer",
        "norm_epsilon": settings.positive("layer_norm_epsilon", 1e-5),
        "maximum_positions": settings.size("n_positions"),
        "activation": settings.activation(activation),
        "gated": False,
    }


def _gpt2_recipes(config: ModelConfig, names: StoredNames) -> Recipes:
    kernels = family.projection_names(config, PROJECTIONS, FUSED, kernel=identity)
    return llama_layout.layout_recipes(
        config,
        names,
        modules={},
        norms=NORMS,
        others=kernels,
        outside=POSITIONS,
        **OUTSIDE,
    )


def _gpt2_settings(config: ModelConfig) -> dict[str, Any]:
    """Returns `config.json`, as `transformers.GPT2Config` reads it."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocabulary_size,
        "n_embd": config.width,
        "n_inner": config.feed_forward_width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_positions": config.maximum_positions,
        "activation_function": hf_settings.activation_setting(config.activation),
        "layer_norm_epsilon": config.norm_epsilon,
        "scale_attn_weights": config.scale_scores,
        "tie_word_embeddings": config.tied_head,
        **family.token_settings(config),
    }


GPT2 = Family(
    model_type="gpt2",
    title="GPT-2",
    read_fields=_read_gpt2,
    recipes=_gpt2_recipes,
    write_settings=_gpt2_settings,
    embedding_tables=("transformer.wte.weight", "wte.weight"),
    base_prefix=PREFIX,
    class_layers=ClassLayers(token_rows="classifier"),
    inert={
        *("resid_pdrop", "embd_pdrop", "attn_pdrop", "initializer_range"),
        *("use_cache", "reorder_and_upcast_attn"),
        *(f"summary_{name}" for name in SUMMARY),
    },
)
