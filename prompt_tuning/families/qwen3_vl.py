"""Qwen 3 VL, dense: reads the text model, which is a Qwen 3.

Each part of a head has another kind of position (time, height, width). In texts all
three are the same, so positions are the usual ones.
"""

from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.llama_layout import read_biases, read_rotated
from prompt_tuning.families.qwen3 import QWEN3
from prompt_tuning.families.text_part import with_images


def _read_qwen3_vl_text(settings: HuggingFaceSettings) -> ModelFields:
    fields = read_rotated(settings, head_width=128, base=500_000.0)
    return fields | {"query_key_norm": "head", "biases": read_biases(settings)}


QWEN3_VL = with_images(
    QWEN3,
    "qwen3_vl",
    "Qwen 3 VL (dense; text model only)",
    {"qwen3_vl_text": _read_qwen3_vl_text},
    tied=False,
    unread_parts=("visual",),
)
