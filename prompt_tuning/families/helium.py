"""Helium: a Llama with interleaved rotary positions."""

from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.llama import LLAMA
from prompt_tuning.families.llama_layout import read_rotated


def _read_helium(settings: HuggingFaceSettings) -> ModelFields:
    settings.require("mlp_bias", False, "biases of Helium's MLP are not implemented")
    fields = read_rotated(settings, epsilon=1e-8, head_width=128, base=100_000.0)
    return fields | {
        "rotary_interleaved": True,
        "biases": "qkv" if settings.flag("attention_bias", False) else "none",
    }


HELIUM = LLAMA.like("helium", "Helium", _read_helium)
