"""Qwen 3.5 with images: the text model is read.

Positions of texts are as in other models; see `qwen3_vl`.
"""

import dataclasses
from collections.abc import Collection
from typing import Any

from prompt_tuning.checkpoints.stored_tensors import Recipe
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families.hf_settings import HuggingFaceSettings
from prompt_tuning.families.qwen3_5 import (
    QWEN3_5_TEXT,
    qwen3_5_recipes,
    read_qwen3_5,
)
from prompt_tuning.families.text_part import (
    ALIASES,
    IMAGE_TOKENS,
    TABLES,
    TEXT,
    part_names,
    read_text_part,
)


def read_qwen3_5_images(settings: HuggingFaceSettings) -> dict[str, Any]:
    """Returns fields of `ModelConfig` of the text model.

    Raises:
      InputError: for a missing setting or an unsupported choice.
    """
    readers = {QWEN3_5_TEXT.model_type: read_qwen3_5}
    return read_text_part(settings, readers, tied=False)


def qwen3_5_images_recipes(
    config: ModelConfig, names: Collection[str]
) -> dict[str, Recipe]:
    """Returns the recipes of all parameters; see `Family.recipes`."""
    prefix, head = part_names(names)
    return qwen3_5_recipes(config, names, prefix=prefix, head=head)


QWEN3_5 = dataclasses.replace(
    QWEN3_5_TEXT,
    model_type="qwen3_5",
    title="Qwen 3.5 (dense) with images, of which the text model is read",
    read_fields=read_qwen3_5_images,
    recipes=qwen3_5_images_recipes,
    embedding_tables=TABLES,
    prefix_aliases=ALIASES,
    token_parts=(TEXT,),
    unread_parts=("visual",),
    inert=QWEN3_5_TEXT.inert | IMAGE_TOKENS | {"vision_config"},
)
