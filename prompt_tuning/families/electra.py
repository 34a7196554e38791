"""ELECTRA with embeddings of the model's width: a BERT with another head."""

import functools

from prompt_tuning.families.bert import TABLE
from prompt_tuning.families.bert_layout import INERT, bert_recipes, read_bert
from prompt_tuning.families.class_labels import ClassLayers
from prompt_tuning.families.family import Family
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields

PREFIX = "electra."
HEAD = {
    "dense": "generator_predictions.dense",
    "norm": "generator_predictions.LayerNorm",
    "logits": "generator_lm_head",
}


def _read_electra(settings: HuggingFaceSettings) -> ModelFields:
    width = settings.size("hidden_size", 256)
    if settings.size("embedding_size", 128) != width:
        reason = "a projection of narrower embeddings is not implemented"
        settings.refuse("embedding_size", f"{width}, the hidden_size: {reason}")
    return read_bert(settings) | {"transform_activation": "gelu"}


ELECTRA = Family(
    model_type="electra",
    title="ELECTRA base and large",
    read_fields=_read_electra,
    recipes=functools.partial(bert_recipes, prefix=PREFIX, head=HEAD),
    embedding_tables=(PREFIX + TABLE, TABLE),
    base_prefix=PREFIX,
    head_name="generator_lm_head.weight",
    logit_bias=("generator_lm_head.bias",),
    class_layers=ClassLayers("classifier.out_proj", "classifier.dense", "", "gelu"),
    unread_modules=(
        "generator_predictions.dense",
        "classifier.dense",
        "classifier.out_proj",
    ),
    inert=INERT
    | {
        *("add_cross_attention", "summary_type", "summary_use_proj"),
        *("summary_activation", "summary_last_dropout"),
    },
)
