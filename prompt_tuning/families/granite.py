"""Granite 3 and 4 (dense): a Llama with four multipliers."""

from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.llama import LLAMA, read_llama


def _read_granite(settings: HuggingFaceSettings) -> ModelFields:
    return read_llama(settings) | {
        "input_multiplier": settings.positive("embedding_multiplier", 1.0),
        "residual_multiplier": settings.positive("residual_multiplier", 1.0),
        "attention_multiplier": settings.positive("attention_multiplier", 1.0),
        "logit_multiplier": 1 / settings.positive("logits_scaling", 1.0),
    }


GRANITE = LLAMA.like("granite", "Granite 3 and 4, dense", _read_granite)
