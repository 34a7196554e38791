"""DistilBERT: a BERT with other names and without token types."""

import functools

from prompt_tuning.families.bert import TABLE
from prompt_tuning.families.bert_layout import EMBEDDINGS, bert_recipes, encoder_fields
from prompt_tuning.families.class_labels import ClassLayers
from prompt_tuning.families.family import Family
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields

PREFIX = "distilbert."
HEAD = {
    "dense": "vocab_transform",
    "norm": "vocab_layer_norm",
    "logits": "vocab_projector",
}
MODULES = {
    "self_attention/query": "attention.q_lin",
    "self_attention/key": "attention.k_lin",
    "self_attention/value": "attention.v_lin",
    "self_attention/out": "attention.out_lin",
    "mlp/up": "ffn.lin1",
    "mlp/down": "ffn.lin2",
}
NORMS = {
    "self_attention_out_norm": "sa_layer_norm",
    "mlp_out_norm": "output_layer_norm",
}


def _read_distilbert(settings: HuggingFaceSettings) -> ModelFields:
    width, heads = settings.size("dim", 768), settings.size("n_heads", 12)
    activation = settings.activation(settings.text("activation", "gelu"))
    return {
        **encoder_fields(activation),
        "vocabulary_size": settings.size("vocab_size"),
        "width": width,
        "feed_forward_width": settings.size("hidden_dim", 4 * 768),
        "layers": settings.layers("n_layers", 6),
        "heads": heads,
        "key_value_heads": heads,
        "head_width": settings.head_width(width, heads),
        "norm_epsilon": 1e-12,
        "maximum_positions": settings.size("max_position_embeddings", 512),
        "tied_head": settings.flag("tie_word_embeddings", True),
    }


DISTILBERT = Family(
    model_type="distilbert",
    title="DistilBERT",
    read_fields=_read_distilbert,
    recipes=functools.partial(
        bert_recipes,
        prefix=PREFIX,
        head=HEAD,
        embeddings={k: v for k, v in EMBEDDINGS.items() if "type_" not in k},
        pattern="transformer.layer.{}.",
        modules=MODULES,
        norms=NORMS,
    ),
    embedding_tables=(PREFIX + TABLE, TABLE),
    base_prefix=PREFIX,
    head_name="vocab_projector.weight",
    logit_bias=("vocab_projector.bias",),
    class_layers=ClassLayers("classifier", "pre_classifier", "", "relu"),
    unread_modules=("vocab_transform", "pre_classifier", "classifier"),
    inert={
        *("dropout", "attention_dropout", "initializer_range"),
        *("qa_dropout", "seq_classif_dropout"),
        # The table of positions is stored in any case.
        "sinusoidal_pos_embds",
    },
)
