"""AFM: a Llama with two projections and a squared ReLU as its feed-forward layer."""

from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.llama import LLAMA, read_llama


def _read_arcee(settings: HuggingFaceSettings) -> ModelFields:
    return read_llama(settings) | {
        "activation": settings.activation(settings.text("hidden_act", "relu2")),
        "norm_epsilon": settings.positive("rms_norm_eps", 1e-5),
        "gated": False,
    }


ARCEE = LLAMA.like("arcee", "Arcee AFM 4.5B", _read_arcee)
