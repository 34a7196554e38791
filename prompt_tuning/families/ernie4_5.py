"""ERNIE 4.5, dense: a Llama with interleaved rotary positions."""

from typing import Any

from prompt_tuning.families.hf_settings import HuggingFaceSettings
from prompt_tuning.families.llama import LLAMA
from prompt_tuning.families.llama_layout import INERT, read_layout
from prompt_tuning.families.rotary_settings import read_rotary


def read_ernie4_5(settings: HuggingFaceSettings) -> dict[str, Any]:
    """Returns fields of `ModelConfig`; see `Family.read_fields`."""
    fields = read_layout(settings, tied=True, head_width=128)
    return (
        fields
        | read_rotary(settings, fields["head_width"], base=500_000.0)
        | {
            "norm_epsilon": settings.positive("rms_norm_eps", 1e-5),
            "rotary_interleaved": True,
            "biases": "all" if settings.flag("use_bias", False) else "none",
        }
    )


ERNIE4_5 = LLAMA.like(
    "ernie4_5",
    "ERNIE 4.5 (dense)",
    read_ernie4_5,
    inert=INERT - {"attention_dropout", "pretraining_tp"},
)
