"""RoBERTa and XLM-R: a BERT with positions counted from the padding id on."""

import dataclasses

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families.bert import TABLE
from prompt_tuning.families.bert_layout import INERT, bert_recipes, read_bert
from prompt_tuning.families.class_labels import ClassLayers
from prompt_tuning.families.family import Family, Recipes, StoredNames
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields

PREFIX = "roberta."
HEAD = {
    "dense": "lm_head.dense",
    "norm": "lm_head.layer_norm",
    "logits": "lm_head",
    "kernel": "lm_head.decoder",
}


def _read_roberta(settings: HuggingFaceSettings) -> ModelFields:
    pad = settings.integer("pad_token_id", 1, minimum=0)
    # The transform of tokens has GELU whatever the layers have.
    fields = read_bert(settings, first_position=pad + 1)
    return fields | {"pad_id": pad, "transform_activation": "gelu"}


def _roberta_recipes(config: ModelConfig, names: StoredNames) -> Recipes:
    first = config.pad_id + 1
    return bert_recipes(config, names, prefix=PREFIX, head=HEAD, first_position=first)


ROBERTA = Family(
    model_type="roberta",
    title="RoBERTa",
    read_fields=_read_roberta,
    recipes=_roberta_recipes,
    embedding_tables=(PREFIX + TABLE, TABLE),
    base_prefix=PREFIX,
    head_name="lm_head.decoder.weight",
    logit_bias=("lm_head.bias",),
    class_layers=ClassLayers("classifier.out_proj", "classifier.dense"),
    unread_modules=("lm_head.dense", "classifier.dense", "classifier.out_proj"),
    inert=INERT | {"add_cross_attention"},
)
XLM_ROBERTA = dataclasses.replace(
    ROBERTA, model_type="xlm-roberta", title="XLM-R (XLM-RoBERTa)"
)
