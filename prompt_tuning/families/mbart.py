"""mBART 50 and M2M-100: a BART with norms before each sublayer.

M2M-100 (also NLLB) has sinusoidal positions, and no bias of logits.
"""

from prompt_tuning.families.bart import BART, read_stacks
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields


def _read_mbart(settings: HuggingFaceSettings) -> ModelFields:
    # Without it each text's decoder would begin with the language of the text.
    start = settings.integer("decoder_start_token_id")
    reason = "transformers begins each text with its last token, the end"
    settings.require("eos_token_id", start, reason)
    return read_stacks(settings) | {
        "norm_placement": "before",
        "positions": "learned",
        "embedding_norm": True,
        "decoder_start_id": start,
    }


def _read_m2m_100(settings: HuggingFaceSettings) -> ModelFields:
    settings.require("pad_token_id", 1, "positions are counted from the next number")
    return read_stacks(settings, activation="relu", scaled=True) | {
        "norm_placement": "before",
        "positions": "sinusoidal_from_2",
        "decoder_start_id": settings.integer("decoder_start_token_id", 2),
    }


MBART = BART.like("mbart", "mBART 50", _read_mbart)
M2M_100 = BART.like("m2m_100", "M2M-100, NLLB", _read_m2m_100, logit_bias=())
