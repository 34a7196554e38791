"""StableLM: a Llama with layer norms and partial rotary positions."""

from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.llama import LLAMA
from prompt_tuning.families.llama_layout import read_rotated


def _read_stablelm(settings: HuggingFaceSettings) -> ModelFields:
    reason = "a norm for each head, stored apart (StableLM 2 12B), is not implemented"
    settings.require("qk_layernorm", False, reason)
    parallel = settings.flag("use_parallel_residual", False)
    return {
        **read_rotated(settings, divided=True, partial=0.25),
        "norm": "layer",
        "norm_epsilon": settings.positive("layer_norm_eps", 1e-5),
        "parallel": parallel,
        "shared_norm": parallel,
        "biases": "qkv" if settings.flag("use_qkv_bias", False) else "none",
    }


STABLELM = LLAMA.like(
    "stablelm",
    "StableLM 3B, StableLM 2 1.6B",
    _read_stablelm,
    more_inert={"hidden_dropout"},
)
