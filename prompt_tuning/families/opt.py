"""OPT: a GPT-2 with ReLU and separate projections; positions are counted from 2."""

from prompt_tuning.checkpoints.stored_tensors import Recipe, RowsFrom
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families.family import Family, Recipes, StoredNames
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.llama_layout import layout_recipes

PREFIX = "model."
FIRST_POSITION = 2
PROJECTIONS = {
    "self_attention/query": "self_attn.q_proj",
    "self_attention/key": "self_attn.k_proj",
    "self_attention/value": "self_attn.v_proj",
    "self_attention/out": "self_attn.out_proj",
    "mlp/up": "fc1",
    "mlp/down": "fc2",
}
NORMS = {"self_attention_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"}


def _read_opt(settings: HuggingFaceSettings) -> ModelFields:
    reason = "that variant of OPT (350M, Galactica) is not implemented"
    settings.require("do_layer_norm_before", True, reason)
    settings.require("_remove_final_layer_norm", False, reason)
    settings.require("layer_norm_elementwise_affine", True, reason)
    width, heads = settings.size("hidden_size"), settings.size("num_attention_heads")
    settings.require("word_embed_proj_dim", width, reason)
    activation = settings.text("activation_function", "relu")
    return {
        "architecture": "decoder_only",
        "vocabulary_size": settings.size("vocab_size"),
        "width": width,
        "feed_forward_width": settings.size("ffn_dim"),
        "layers": settings.layers("num_hidden_layers"),
        "heads": heads,
        "key_value_heads": heads,
        "head_width": settings.head_width(width, heads),
        "norm": "layer",
        "norm_epsilon": 1e-5,
        "positions": "learned",
        "maximum_positions": settings.size("max_position_embeddings"),
        "activation": settings.activation(activation),
        "gated": False,
        "biases": "all" if settings.flag("enable_bias", True) else "none",
        "tied_head": settings.flag("tie_word_embeddings", True),
    }


def _opt_recipes(config: ModelConfig, names: StoredNames) -> Recipes:
    prefix = "decoder." if "decoder.embed_tokens.weight" in names else "model.decoder."
    recipes = layout_recipes(
        config,
        names,
        modules=PROJECTIONS,
        norms=NORMS,
        prefix=prefix,
        final_norm="final_layer_norm",
    )
    positions = Recipe(
        (f"{prefix}embed_positions.weight",), transform=RowsFrom(FIRST_POSITION)
    )
    return recipes | {"position_embedder/embedding": positions}


OPT = Family(
    model_type="opt",
    title="OPT",
    read_fields=_read_opt,
    recipes=_opt_recipes,
    embedding_tables=(
        "model.decoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
    ),
    base_prefix=PREFIX,
    inert={"dropout", "attention_dropout", "layerdrop", "init_std", "use_cache"},
)
