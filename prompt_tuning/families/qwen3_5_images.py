"""Qwen 3.5 with images, dense or with experts: reads the text model.

Texts have the usual positions; see `qwen3_vl`.
"""

import functools

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families import qwen3_5_moe, text_part
from prompt_tuning.families.family import Recipes, StoredNames
from prompt_tuning.families.qwen3_5 import QWEN3_5_TEXT, qwen3_5_recipes, read_qwen3_5

READERS = {QWEN3_5_TEXT.model_type: read_qwen3_5}
MOE_READERS = {qwen3_5_moe.QWEN3_5_MOE_TEXT.model_type: qwen3_5_moe.read_qwen3_5_moe}


def _qwen3_5_images_recipes(config: ModelConfig, names: StoredNames) -> Recipes:
    prefix, head = text_part.part_names(names)
    recipes = qwen3_5_moe.qwen3_5_moe_recipes if config.experts else qwen3_5_recipes
    return recipes(config, names, prefix=prefix, head=head)


QWEN3_5 = QWEN3_5_TEXT.like(
    "qwen3_5",
    "Qwen 3.5 (dense) with images (text model only)",
    functools.partial(text_part.read_text_part, readers=READERS, tied=False),
    **text_part.FIELDS | {"recipes": _qwen3_5_images_recipes},
    unread_parts=("visual",),
    more_inert=text_part.IMAGE_SETTINGS,
)
QWEN3_5_MOE = QWEN3_5.like(
    "qwen3_5_moe",
    "Qwen 3.5 (experts) with images (text model only)",
    functools.partial(text_part.read_text_part, readers=MOE_READERS, tied=False),
    more_inert=qwen3_5_moe.QWEN3_5_MOE_TEXT.inert,
)
