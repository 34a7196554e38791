"""BERT: an encoder with learned positions and norms after each sum."""

import functools

from prompt_tuning.families.bert_layout import INERT, bert_recipes, read_bert
from prompt_tuning.families.class_labels import ClassLayers
from prompt_tuning.families.family import Family

PREFIX = "bert."
HEAD = {
    "dense": "cls.predictions.transform.dense",
    "norm": "cls.predictions.transform.LayerNorm",
    "logits": "cls.predictions",
    "kernel": "cls.predictions.decoder",
}
TABLE = "embeddings.word_embeddings.weight"

BERT = Family(
    model_type="bert",
    title="BERT",
    read_fields=read_bert,
    recipes=functools.partial(bert_recipes, prefix=PREFIX, head=HEAD),
    embedding_tables=(PREFIX + TABLE, TABLE),
    base_prefix=PREFIX,
    head_name="cls.predictions.decoder.weight",
    logit_bias=("cls.predictions.bias",),
    class_layers=ClassLayers("classifier", "bert.pooler.dense", saved=False),
    unread_modules=(
        "bert.pooler.dense",
        "cls.predictions.transform.dense",
        "classifier",
    ),
    inert=INERT | {"add_cross_attention"},
)
