"""Qwen 2 and 2.5: a Llama with biases on the query, key and value projections."""

from typing import Any

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.layer_settings import read_windows
from prompt_tuning.families.llama import LLAMA, llama_settings
from prompt_tuning.families.llama_layout import read_rotated
from prompt_tuning.families.rotary_settings import FULL, SLIDING


def _read_qwen2(settings: HuggingFaceSettings) -> ModelFields:
    fields = read_rotated(settings)
    return fields | read_qwen_windows(settings, fields["layers"]) | {"biases": "qkv"}


def read_qwen_windows(settings: HuggingFaceSettings, layers: int) -> ModelFields:
    """Reads the windows, which upper layers have if `use_sliding_window` is set."""
    first = settings.integer("max_window_layers", 28)
    if not settings.flag("use_sliding_window", False):
        reason = "use_sliding_window is not set"
        settings.require("layer_types", [FULL] * layers, reason)
        return {}
    kinds = [SLIDING if i >= first else FULL for i in range(layers)]
    return read_windows(settings, layers, kinds)


def _qwen2_settings(config: ModelConfig) -> dict[str, Any]:
    """Returns `config.json`, as `transformers.Qwen2Config` reads it."""
    settings = llama_settings(config)
    del settings["attention_bias"], settings["mlp_bias"]
    return settings | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": False,
    }


QWEN2 = LLAMA.like(
    "qwen2", "Qwen 2 and 2.5", _read_qwen2, write_settings=_qwen2_settings
)
