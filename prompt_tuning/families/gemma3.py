"""Gemma 3: norms of queries and keys, two bases of rotary positions.

For models that also read images, only the text model is read.
"""

from prompt_tuning.families import layer_settings, text_part
from prompt_tuning.families.gemma import GEMMA, read_gemma_layout
from prompt_tuning.families.gemma2 import SIZES
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.rotary_settings import read_window_rotary

TEXT_DEFAULTS = {
    **SIZES,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
}
"""Values that published folders leave to `transformers.Gemma3TextConfig`."""


def _read_gemma3(settings: HuggingFaceSettings) -> ModelFields:
    settings.choose("hidden_activation", ("gelu_pytorch_tanh",))
    ignored = "transformers ignores it in Gemma 3"
    settings.require("attn_logit_softcapping", None, ignored)
    fields = read_gemma_layout(settings, base=1_000_000.0)
    layers = fields["layers"]
    pattern = layer_settings.alternating(
        layers, settings.size("sliding_window_pattern", 6)
    )
    local_base = settings.positive("rope_local_base_freq", 10_000.0)
    return {
        **fields,
        **layer_settings.read_windows(settings, layers, pattern),
        **read_window_rotary(settings, local_base),
        "norm_placement": "around",
        "query_key_norm": "head",
        "attention_multiplier": settings.positive("query_pre_attn_scalar") ** -0.5,
        **layer_settings.read_soft_caps(settings),
    }


GEMMA3_TEXT = GEMMA.like(
    "gemma3_text",
    "Gemma 3, text models",
    _read_gemma3,
    prefix_aliases=text_part.ALIASES,
)
GEMMA3 = text_part.with_images(
    GEMMA3_TEXT,
    "gemma3",
    "Gemma 3 with images (text model only)",
    {"gemma3_text": _read_gemma3},
    tied=True,
    defaults=TEXT_DEFAULTS,
    head_name=text_part.STORED_HEAD,
    unread_parts=("vision_tower", "multi_modal_projector"),
    unread_modules=tuple(
        f"model.vision_tower.encoder.layers.{{}}.self_attn.{name}_proj"
        for name in ("q", "k", "v")
    ),
    more_inert={"mm_tokens_per_image"},
)
