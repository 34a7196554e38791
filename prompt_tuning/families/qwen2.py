"""Qwen 2 and 2.5: a Llama with biases on the query, key and value projections."""

import dataclasses
from typing import Any

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families.hf_settings import HuggingFaceSettings
from prompt_tuning.families.llama import LLAMA, llama_settings, read_llama


def read_qwen2(settings: HuggingFaceSettings) -> dict[str, Any]:
    """Returns fields of `ModelConfig`.

    Raises:
      InputError: for a missing setting or an unsupported choice.
    """
    reason = "sliding windows are not implemented"
    settings.require("use_sliding_window", False, reason)
    layers = settings.layers("num_hidden_layers")
    settings.require("layer_types", ["full_attention"] * layers, reason)
    return read_llama(settings) | {"biases": "qkv"}


def qwen2_settings(config: ModelConfig) -> dict[str, Any]:
    """Returns `config.json`, as `transformers.Qwen2Config` reads it."""
    settings = llama_settings(config)
    del settings["attention_bias"], settings["mlp_bias"]
    return settings | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": False,
    }


QWEN2 = dataclasses.replace(
    LLAMA,
    model_type="qwen2",
    read_fields=read_qwen2,
    write_settings=qwen2_settings,
)
