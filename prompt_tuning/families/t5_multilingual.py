"""mT5, and UMT5 with a relative position bias in every block."""

from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.t5 import GATED_GELU, T5, read_t5


def _read_mt5(settings: HuggingFaceSettings) -> ModelFields:
    """Returns fields of `ModelConfig`; a tied head does not scale hidden states."""
    return read_t5(settings, GATED_GELU) | {"scale_tied_hidden": False}


def _read_umt5(settings: HuggingFaceSettings) -> ModelFields:
    return read_t5(settings, GATED_GELU) | {"relative_bias_in_each_block": True}


MT5 = T5.like("mt5", "mT5", _read_mt5)
UMT5 = MT5.like("umt5", "UMT5", _read_umt5)
