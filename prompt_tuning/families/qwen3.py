"""Qwen 3: a Llama with norms of queries and keys and a separate head width."""

from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.llama import LLAMA
from prompt_tuning.families.llama_layout import read_biases, read_rotated
from prompt_tuning.families.qwen2 import read_qwen_windows


def _read_qwen3(settings: HuggingFaceSettings) -> ModelFields:
    fields = read_rotated(settings, head_width=128)
    return {
        **fields,
        **read_qwen_windows(settings, fields["layers"]),
        "biases": read_biases(settings),
        "query_key_norm": "head",
    }


QWEN3 = LLAMA.like("qwen3", "Qwen 3 (dense)", _read_qwen3)
