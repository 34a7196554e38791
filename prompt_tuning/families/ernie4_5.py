"""ERNIE 4.5, dense: a Llama with interleaved rotary positions."""

from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.llama import LLAMA
from prompt_tuning.families.llama_layout import INERT, read_rotated


def _read_ernie4_5(settings: HuggingFaceSettings) -> ModelFields:
    fields = read_rotated(
        settings, epsilon=1e-5, tied=True, head_width=128, base=500_000.0
    )
    return fields | {
        "rotary_interleaved": True,
        "biases": "all" if settings.flag("use_bias", False) else "none",
    }


ERNIE4_5 = LLAMA.like(
    "ernie4_5",
    "ERNIE 4.5 (dense)",
    _read_ernie4_5,
    inert=INERT - {"attention_dropout", "pretraining_tp"},
)
