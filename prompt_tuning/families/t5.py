"""T5 1.0 and 1.1 in Hugging Face format; `t5x` has the names in T5X checkpoints."""

from typing import Any

from prompt_tuning.checkpoints.stored_tensors import Recipe, layered, transpose
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families import family, hf_settings
from prompt_tuning.families.class_labels import ClassLayers
from prompt_tuning.families.family import Family, Recipes, StoredNames
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields

PREFIX = "transformer."
TABLES = tuple(
    f"{prefix}{name}.weight"
    for prefix in ("", PREFIX)
    for name in ("shared", "encoder.embed_tokens", "decoder.embed_tokens")
)
GATED_GELU = "gated-gelu"


def read_t5(settings: HuggingFaceSettings, feed_forward: str = "relu") -> ModelFields:
    """Returns fields of `ModelConfig`; see `Family.read_fields`.

    `feed_forward` is the default kind of feed-forward layer.
    """
    feed_forward = settings.text("feed_forward_proj", feed_forward)
    activation = feed_forward.removeprefix("gated-")
    if feed_forward == GATED_GELU:
        # T5 1.1 was trained with the tanh approximation despite the name.
        activation = "gelu_new"
    # transformers also writes what follows from it, and then reads that.
    activation = settings.text("dense_act_fn", activation)
    gated = settings.flag("is_gated_act", feed_forward.startswith("gated-"))
    layers, heads = settings.layers("num_layers"), settings.size("num_heads")
    tied = settings.flag("tie_word_embeddings", True)
    return {
        "architecture": "encoder_decoder",
        "vocabulary_size": settings.size("vocab_size"),
        "width": settings.size("d_model"),
        "feed_forward_width": settings.size("d_ff"),
        "layers": settings.layers("num_decoder_layers", layers),
        "encoder_layers": layers,
        "heads": heads,
        "key_value_heads": heads,
        "head_width": settings.size("d_kv"),
        "norm": "rms",
        "norm_epsilon": settings.positive("layer_norm_epsilon", 1e-6),
        "positions": "relative",
        "relative_buckets": settings.size("relative_attention_num_buckets"),
        "relative_maximum_distance": settings.size(
            "relative_attention_max_distance", 128
        ),
        "activation": settings.activation(activation),
        "gated": gated,
        "tied_head": tied,
        "scale_tied_hidden": settings.flag("scale_decoder_outputs", tied),
        "scale_scores": False,
    }


def _t5_recipes(config: ModelConfig, names: StoredNames) -> Recipes:
    # Some checkpoints store the shared table only by the name in one of the stacks.
    usual = f"{PREFIX}shared.weight" if config.labels else TABLES[0]
    table = next((name for name in TABLES if name in names), usual)
    prefix = PREFIX if table.startswith(PREFIX) else ""
    tables = {"token_embedder/embedding": Recipe((table,))}
    if config.bidirectional:  # the encoder alone is our stack without a causal mask
        encoder = _stack_recipes("encoder", config.layers, config, prefix)
        ours = {p.replace("encoder", "decoder", 1): x for p, x in encoder.items()}
        return tables | ours | family.head_recipe(config)
    return {
        **tables,
        **_stack_recipes("encoder", config.encoder_layers, config, prefix),
        **_stack_recipes("decoder", config.layers, config, prefix),
        **family.head_recipe(config),
    }


def _stack_recipes(
    stack: str, layers: int, config: ModelConfig, prefix: str
) -> Recipes:
    # Sublayers of a block are numbered; only the decoder has cross attention.
    attention = {"self_attention": ("layer.0", "SelfAttention")}
    if stack == "decoder":
        attention["cross_attention"] = ("layer.1", "EncDecAttention")
    modules, norms = {}, {}
    for ours, (layer, theirs) in attention.items():
        norms[f"{ours}_norm"] = f"{layer}.layer_norm"
        for name in ("query", "key", "value", "out"):
            modules[f"{ours}/{name}"] = f"{layer}.{theirs}.{name[0]}"
    layer = f"layer.{len(attention)}"
    norms["mlp_norm"] = f"{layer}.layer_norm"
    inputs = {"gate": "wi_0", "up": "wi_1"} if config.gated else {"up": "wi"}
    for name, theirs in {**inputs, "down": "wo"}.items():
        modules[f"mlp/{name}"] = f"{layer}.DenseReluDense.{theirs}"
    names = family.norm_names(config, norms) | family.projection_names(config, modules)
    name = "layer.0.SelfAttention.relative_attention_bias.weight"
    # The first block stores a bias that all blocks of a stack share.
    first = prefix + stack
    bias = Recipe((f"{first}.block.0.{name}",), False, transpose)
    if config.relative_bias_in_each_block:
        bias = layered(f"{first}.block.{{}}.{name}", layers, transpose)
    return {
        **family.layer_recipes(stack, f"{first}.block.{{}}.", layers, names),
        f"{stack}/relative_position_bias/embedding": bias,
        **family.final_norm_recipes(config, stack, f"{first}.final_layer_norm"),
    }


def _t5_settings(config: ModelConfig) -> dict[str, Any]:
    """Returns `config.json`, as `transformers.T5Config` reads it."""
    activation = hf_settings.activation_setting(config.activation)
    feed_forward = f"gated-{activation}" if config.gated else activation
    settings = {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "vocab_size": config.vocabulary_size,
        "d_model": config.width,
        "d_ff": config.feed_forward_width,
        "d_kv": config.head_width,
        "num_layers": config.encoder_layers,
        "num_decoder_layers": config.layers,
        "num_heads": config.heads,
        "feed_forward_proj": (
            GATED_GELU if feed_forward == "gated-gelu_new" else feed_forward
        ),
        "layer_norm_epsilon": config.norm_epsilon,
        "relative_attention_num_buckets": config.relative_buckets,
        "relative_attention_max_distance": config.relative_maximum_distance,
        "dropout_rate": config.dropout_rate,
        "tie_word_embeddings": config.tied_head,
        "decoder_start_token_id": config.decoder_start_id,
        **family.token_settings(config),
    }
    if config.scale_tied_hidden != config.tied_head:
        settings["scale_decoder_outputs"] = config.scale_tied_hidden
    return settings


T5 = Family(
    model_type="t5",
    title="T5 1.0 and 1.1, Flan-T5",
    read_fields=read_t5,
    recipes=_t5_recipes,
    write_settings=_t5_settings,
    embedding_tables=TABLES,
    prefix_aliases=(PREFIX,),
    class_layers=ClassLayers(
        "classification_head.out_proj",
        "classification_head.dense",
        token_rows="classifier",
        encodes_tokens=True,
    ),
    inert={
        *("dropout_rate", "classifier_dropout", "initializer_factor", "use_cache"),
        *("is_encoder_decoder", "is_decoder"),
    },
    # transformers 5 ties every T5 without a head in its checkpoint.
    tied_without_head=True,
)
