"""DeBERTa 2 and 3: encoders that compare content and relative positions."""

from prompt_tuning.checkpoints.stored_tensors import Recipe
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families import bert, bert_layout
from prompt_tuning.families.class_labels import ClassLayers
from prompt_tuning.families.family import Family, Recipes, StoredNames, norm_names
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields

PREFIX, NEW_HEAD = "deberta.", "lm_predictions.lm_head"
DIRECTIONS = {"p2c", "c2p"}
PROJECTIONS = {
    f"self_attention/{name}": f"attention.self.{name}_proj"
    for name in ("query", "key", "value")
}


def _read_deberta(settings: HuggingFaceSettings) -> ModelFields:
    reason = "models of before version 2, and its variants, are not implemented"
    for name, default, needed in (
        ("relative_attention", False, True),
        ("share_att_key", False, True),
        ("position_biased_input", True, False),
        ("norm_rel_ebd", "none", "layer_norm"),
    ):
        if settings.value(name, default) != needed:
            settings.refuse(name, f"{needed!r}: {reason}")
    kinds = settings.value("pos_att_type", None) or []
    kinds = kinds.lower().split("|") if isinstance(kinds, str) else kinds
    if {str(kind).strip() for kind in kinds} != DIRECTIONS:
        settings.refuse("pos_att_type", f"'p2c' and 'c2p': {reason}")
    if settings.integer("conv_kernel_size", 0) > 0:
        settings.refuse("conv_kernel_size", "0: its convolution is not implemented")
    width = settings.size("hidden_size", 1536)
    for name in ("embedding_size", "pooler_hidden_size"):
        settings.require(name, width, "only the hidden_size is implemented")
    heads = settings.size("num_attention_heads", 24)
    head_width = settings.head_width(width, heads)
    settings.require("attention_head_size", head_width, reason)
    settings.require("pooler_hidden_act", "gelu", "others are not implemented")
    activation = settings.activation(settings.text("hidden_act", "gelu"))
    maximum = settings.integer("max_relative_positions", -1, minimum=-1)
    if maximum < 1:
        maximum = settings.size("max_position_embeddings", 512)
    # Less than half of the buckets must reach the distance of the last one.
    most = 2 * maximum - 3
    buckets = settings.integer("position_buckets", minimum=4, maximum=most)
    return {
        **bert_layout.encoder_fields(activation),
        "vocabulary_size": settings.size("vocab_size", 128_100),
        "width": width,
        "feed_forward_width": settings.size("intermediate_size", 6144),
        "layers": settings.layers("num_hidden_layers", 24),
        "heads": heads,
        "key_value_heads": heads,
        "head_width": head_width,
        "norm_epsilon": settings.positive("layer_norm_eps", 1e-7),
        "positions": "disentangled",
        "relative_buckets": buckets,
        "relative_maximum_distance": maximum,
        "attention_multiplier": (head_width * (1 + len(DIRECTIONS))) ** -0.5,
        "token_types": settings.integer("type_vocab_size", 0, minimum=0),
        "tied_head": settings.flag("tie_word_embeddings", True),
    }


def _deberta_recipes(config: ModelConfig, names: StoredNames) -> Recipes:
    embeddings = bert_layout.EMBEDDINGS.copy()
    del embeddings["position_embedder/embedding"]
    if not config.token_types:
        del embeddings["type_embedder/embedding"]
    head = bert.HEAD
    if f"{NEW_HEAD}.bias" in names:
        head = {
            "dense": f"{NEW_HEAD}.dense",
            "norm": f"{NEW_HEAD}.LayerNorm",
            "logits": NEW_HEAD,
        }
    recipes = bert_layout.bert_recipes(
        config,
        names,
        prefix=PREFIX,
        head=head,
        embeddings=embeddings,
        modules=bert_layout.MODULES | PROJECTIONS,
    )
    word = recipes["token_embedder/embedding"].sources[0]
    encoder = f"{word.removesuffix(bert.TABLE)}encoder."
    vectors = "decoder/relative_vectors"
    recipes[f"{vectors}/embedding"] = Recipe((f"{encoder}rel_embeddings.weight",))
    norm = norm_names(config, {f"{vectors}/norm": f"{encoder}LayerNorm"})
    return recipes | {path: Recipe((name,)) for path, (name, _) in norm.items()}


DEBERTA_V2 = Family(
    model_type="deberta-v2",
    title="DeBERTa 2 and 3",
    read_fields=_read_deberta,
    recipes=_deberta_recipes,
    embedding_tables=(PREFIX + bert.TABLE, bert.TABLE),
    base_prefix=PREFIX,
    head_name="cls.predictions.decoder.weight",
    logit_bias=("cls.predictions.bias", f"{NEW_HEAD}.bias"),
    class_layers=ClassLayers("classifier", "pooler.dense", "", "gelu", saved=False),
    unread_modules=(
        *("pooler.dense", "cls.predictions.transform.dense", "classifier"),
        f"{NEW_HEAD}.dense",
    ),
    # The stored names tell which of the two heads there is.
    inert=bert_layout.INERT | {"legacy", "pooler_dropout", "cls_dropout"},
)
