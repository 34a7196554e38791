"""Qwen 3 VL, dense: reads the text model, which is a Qwen 3.

Each part of a head has another kind of position (time, height, width). In texts all
three are the same, so positions are the usual ones.
"""

from prompt_tuning.families import text_part
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.llama_layout import read_biases, read_rotated
from prompt_tuning.families.qwen3 import QWEN3


def _read_qwen3_vl_text(settings: HuggingFaceSettings) -> ModelFields:
    fields = read_rotated(settings, head_width=128, base=500_000.0)
    return fields | {"query_key_norm": "head", "biases": read_biases(settings)}


def _read_qwen3_vl(settings: HuggingFaceSettings) -> ModelFields:
    readers = {"qwen3_vl_text": _read_qwen3_vl_text}
    return text_part.read_text_part(settings, readers, tied=False)


QWEN3_VL = QWEN3.like(
    "qwen3_vl",
    "Qwen 3 VL (dense; text model only)",
    _read_qwen3_vl,
    **text_part.FIELDS,
    unread_parts=("visual",),
    more_inert=text_part.IMAGE_SETTINGS,
)
