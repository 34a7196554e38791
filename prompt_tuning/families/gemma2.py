"""Gemma 2: soft caps, windows in alternate layers, norms around each sublayer."""

from prompt_tuning.families.gemma import GEMMA, read_gemma_layout
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.layer_settings import (
    alternating,
    read_soft_caps,
    read_windows,
)

SIZES = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
}
"""Defaults of `transformers.Gemma2Config` and of each part of `T5GemmaConfig`."""


def read_gemma2(settings: HuggingFaceSettings) -> ModelFields:
    """Returns fields of `ModelConfig`; see `Family.read_fields`."""
    settings.choose("hidden_activation", ("gelu_pytorch_tanh",))
    fields = read_gemma_layout(settings)
    scalar = settings.positive("query_pre_attn_scalar", 256)
    return {
        **fields,
        **read_windows(settings, fields["layers"], alternating(fields["layers"], 2)),
        "norm_placement": "around",
        "attention_multiplier": scalar**-0.5,
        **read_soft_caps(settings, attention=50.0, logits=30.0),
    }


GEMMA2 = GEMMA.like("gemma2", "Gemma 2", read_gemma2)
