"""Qwen 3.5 with images, dense or with experts: reads the text model.

Texts have the usual positions; see `qwen3_vl`.
"""

from prompt_tuning.families.qwen3_5 import QWEN3_5_TEXT, qwen3_5_recipes
from prompt_tuning.families.qwen3_5_moe import QWEN3_5_MOE_TEXT, qwen3_5_moe_recipes
from prompt_tuning.families.text_part import with_images

QWEN3_5 = with_images(
    QWEN3_5_TEXT,
    "qwen3_5",
    "Qwen 3.5 (dense) with images (text model only)",
    {QWEN3_5_TEXT.model_type: QWEN3_5_TEXT.read_fields},
    tied=False,
    recipes=qwen3_5_recipes,
    unread_parts=("visual",),
)
QWEN3_5_MOE = with_images(
    QWEN3_5_MOE_TEXT,
    "qwen3_5_moe",
    "Qwen 3.5 (experts) with images (text model only)",
    {QWEN3_5_MOE_TEXT.model_type: QWEN3_5_MOE_TEXT.read_fields},
    tied=False,
    recipes=qwen3_5_moe_recipes,
    unread_parts=("visual",),
)
