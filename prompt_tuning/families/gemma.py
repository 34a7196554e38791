"""Gemma: a Llama with scaled embeddings, `1 + w` norms and a tied head."""

from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.llama import LLAMA
from prompt_tuning.families.llama_layout import read_biases, read_rotated

CAUSAL = "attention in both directions is not implemented"


def _read_gemma(settings: HuggingFaceSettings) -> ModelFields:
    # Early folders name another activation, but were trained with this one.
    settings.choose("hidden_act", ("gelu", "gelu_pytorch_tanh"))
    settings.choose("hidden_activation", ("gelu", "gelu_pytorch_tanh"))
    return read_gemma_layout(settings)


def read_gemma_layout(
    settings: HuggingFaceSettings, base: float = 10_000.0
) -> ModelFields:
    """Returns the fields of `ModelConfig` that Gemma 1 to 3 share.

    `base` is the default base of rotary frequencies.
    """
    settings.require("use_bidirectional_attention", False, CAUSAL)
    fields = read_rotated(settings, tied=True, head_width=256, base=base)
    return fields | {
        "key_value_heads": settings.size("num_key_value_heads"),
        "activation": "gelu_tanh",
        "biases": read_biases(settings),
        "norm": "rms_plus_one",
        "embedding_multiplier": fields["width"] ** 0.5,
    }


GEMMA = LLAMA.like("gemma", "Gemma 1", _read_gemma)
