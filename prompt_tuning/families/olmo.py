"""OLMo 1: layer norms without parameters (Groeneveld et al. 2024)."""

from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.llama import LLAMA
from prompt_tuning.families.llama_layout import read_rotated


def _read_olmo(settings: HuggingFaceSettings) -> ModelFields:
    settings.require("clip_qkv", None, "clipped projections are not implemented")
    fields = read_rotated(settings)
    biased = settings.flag("attention_bias", False)
    return fields | {
        "norm": "layer_fixed",
        "norm_epsilon": 1e-5,
        "biases": "attention" if biased else "none",
    }


OLMO = LLAMA.like("olmo", "OLMo 1", _read_olmo)
