"""Gemma 2: soft caps, windows in every second layer, norms around sublayers."""

import dataclasses
from typing import Any

from prompt_tuning.families.gemma import GEMMA, read_gemma_layout
from prompt_tuning.families.hf_settings import HuggingFaceSettings
from prompt_tuning.families.layer_settings import alternating, read_windows
from prompt_tuning.families.rotary_settings import read_rotary


def read_gemma2(settings: HuggingFaceSettings) -> dict[str, Any]:
    """Returns fields of `ModelConfig`.

    Raises:
      InputError: for a missing setting or an unsupported choice.
    """
    fields = read_gemma2_layout(settings, (50.0, 30.0))
    layers = fields["layers"]
    return (
        fields
        | read_rotary(settings, fields["head_width"])
        | read_windows(settings, layers, alternating(layers, 2))
    )


def read_gemma2_layout(
    settings: HuggingFaceSettings, caps: tuple[float | None, float | None]
) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` that Gemma 2 and 3 share.

    Args:
      settings: the settings in `config.json`.
      caps: soft caps of attention and of logits if there are no settings.
    """
    settings.choose("hidden_activation", ("gelu_pytorch_tanh",))
    return read_gemma_layout(settings) | {
        "norm_placement": "around",
        "attention_multiplier": settings.positive("query_pre_attn_scalar") ** -0.5,
        "attention_soft_cap": _read_cap(settings, "attn_logit_softcapping", caps[0]),
        "logit_soft_cap": _read_cap(settings, "final_logit_softcapping", caps[1]),
    }


def _read_cap(
    settings: HuggingFaceSettings, name: str, default: float | None
) -> float | None:
    """Returns a soft cap, which is absent if it is null, unlike other settings."""
    return settings.positive(name, None if name in settings.values else default)


GEMMA2 = dataclasses.replace(
    GEMMA, model_type="gemma2", title="Gemma 2", read_fields=read_gemma2
)
