"""Names of tensors and settings that BERT shares with most encoders."""

from collections.abc import Mapping

from prompt_tuning.checkpoints.stored_tensors import (
    Recipe,
    RowsFrom,
    layered,
    transpose,
)
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families.class_labels import BIAS, DENSE, DENSE_BIAS, HEAD
from prompt_tuning.families.family import (
    Recipes,
    StoredNames,
    norm_names,
    projection_names,
)
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields

EMBEDDINGS = {
    "token_embedder/embedding": "embeddings.word_embeddings.weight",
    "position_embedder/embedding": "embeddings.position_embeddings.weight",
    "type_embedder/embedding": "embeddings.token_type_embeddings.weight",
}
MODULES = {
    **{
        f"self_attention/{name}": f"attention.self.{name}"
        for name in ("query", "key", "value")
    },
    "self_attention/out": "attention.output.dense",
    "mlp/up": "intermediate.dense",
    "mlp/down": "output.dense",
}
NORMS = {
    "self_attention_out_norm": "attention.output.LayerNorm",
    "mlp_out_norm": "output.LayerNorm",
}
INERT = {
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range"),
    *("use_cache", "classifier_dropout"),
}


def read_bert(settings: HuggingFaceSettings, *, first_position: int = 0) -> ModelFields:
    """Returns fields of `ModelConfig`; see `Family.read_fields`.

    `first_position` is the first position's row in the table.
    """
    settings.require("is_decoder", False, "as a decoder it is not implemented")
    settings.require(
        "position_embedding_type", "absolute", "others are not implemented"
    )
    width, heads = settings.size("hidden_size"), settings.size("num_attention_heads")
    activation = settings.activation(settings.text("hidden_act", "gelu"))
    positions = settings.size("max_position_embeddings", 512) - first_position
    return {
        **encoder_fields(activation),
        "vocabulary_size": settings.size("vocab_size"),
        "width": width,
        "feed_forward_width": settings.size("intermediate_size"),
        "layers": settings.layers("num_hidden_layers"),
        "heads": heads,
        "key_value_heads": heads,
        "head_width": settings.head_width(width, heads),
        "norm_epsilon": settings.positive("layer_norm_eps", 1e-12),
        "maximum_positions": positions,
        "token_types": settings.size("type_vocab_size", 2),
        "tied_head": settings.flag("tie_word_embeddings", True),
    }


def encoder_fields(activation: str) -> ModelFields:
    """Returns the fields that all encoders since BERT have."""
    return {
        "architecture": "decoder_only",
        "bidirectional": True,
        "norm": "layer",
        "norm_placement": "after_sum",
        "positions": "learned",
        "embedding_norm": True,
        "activation": activation,
        "gated": False,
        "biases": "all",
        "pooling": "first",
        "transform_activation": activation,
        "transform_norm": True,
    }


def bert_recipes(
    config: ModelConfig,
    names: StoredNames,
    *,
    prefix: str,
    head: Mapping[str, str],
    first_position: int = 0,
    embeddings: Mapping[str, str] = EMBEDDINGS,
    pattern: str = "encoder.layer.{}.",
    modules: Mapping[str, str] = MODULES,
    norms: Mapping[str, str] = NORMS,
) -> Recipes:
    """Returns the recipes of all parameters; see `Family.recipes`.

    Args:
      config: config of the model.
      names: names of the stored tensors.
      prefix: prefix of the base model.
      head: stored modules "dense", "norm" and "logits" of the masked language model.
      first_position: see `read_bert`.
      embeddings: stored names of the tables.
      pattern: prefix of a layer's names, with `{}` for its index.
      modules: stored module of each projection.
      norms: stored module of each norm in a layer.
    """
    word = embeddings["token_embedder/embedding"]
    prefix = "" if word in names else prefix
    layer = projection_names(config, modules) | norm_names(config, norms)
    recipes = {path: Recipe((prefix + name,)) for path, name in embeddings.items()}
    if position := recipes.get("position_embedder/embedding"):
        rows = Recipe(position.sources, transform=RowsFrom(first_position))
        recipes["position_embedder/embedding"] = rows
    recipes |= {
        f"decoder/layers/{path}": layered(prefix + pattern + name, config.layers, how)
        for path, (name, how) in layer.items()
    }
    single = norm_names(config, {"embedding_norm": prefix + "embeddings.LayerNorm"})
    recipes |= {path: Recipe((name,)) for path, (name, _) in single.items()}
    return recipes | transform_recipes(config, head)


def transform_recipes(config: ModelConfig, head: Mapping[str, str]) -> Recipes:
    """Returns the recipes of a masked language model's head, or none.

    For `head` see `bert_recipes`.
    """
    if config.transform_activation is None:
        return {}
    dense, logits = head["dense"], head["logits"]
    names = {DENSE_BIAS: f"{dense}.bias"} if config.transform_bias else {}
    names[BIAS] = f"{logits}.bias"
    if not config.tied_head:
        names[HEAD] = f"{head.get('kernel', logits)}.weight"
    norm = norm_names(config, {"head/transform/norm": head["norm"]})
    names |= {path: name for path, (name, _) in norm.items()}
    recipes = {path: Recipe((name,)) for path, name in names.items()}
    return recipes | {DENSE: Recipe((f"{dense}.weight",), transform=transpose)}
