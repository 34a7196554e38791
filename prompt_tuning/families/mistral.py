"""Mistral and Ministral: a Llama, with a window in the layers of early versions."""

import dataclasses

from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.layer_settings import has_window, read_windows
from prompt_tuning.families.llama import LLAMA
from prompt_tuning.families.llama_layout import read_rotated
from prompt_tuning.families.rotary_settings import FULL, SLIDING


def read_mistral(settings: HuggingFaceSettings) -> ModelFields:
    """Returns fields of `ModelConfig`; see `Family.read_fields`."""
    # A missing setting has the default of transformers, and null means no window.
    values = {"sliding_window": 4096, **settings.values}
    settings = dataclasses.replace(settings, values=values)
    kind = SLIDING if has_window(settings) else FULL
    reason = "transformers gives all layers of this family the same kind"
    layers = settings.layers("num_hidden_layers")
    settings.require("layer_types", [kind] * layers, reason)
    return _read_ministral(settings)


def _read_ministral(settings: HuggingFaceSettings) -> ModelFields:
    """Returns fields of `ModelConfig`; layers may differ."""
    fields = read_rotated(settings)
    kind = SLIDING if has_window(settings) else FULL
    return {
        **fields,
        "key_value_heads": settings.size("num_key_value_heads"),
        **read_windows(settings, fields["layers"], [kind] * fields["layers"]),
    }


MISTRAL = LLAMA.like("mistral", "Mistral 7B, NeMo, Small", read_mistral)
MINISTRAL = MISTRAL.like("ministral", "Ministral", _read_ministral)
