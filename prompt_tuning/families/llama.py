"""Llama 1 to 3, and models with its architecture."""

from typing import Any

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.rotary_scaling import RotaryScaling
from prompt_tuning.families import hf_settings, llama_layout
from prompt_tuning.families.family import Family, token_settings
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields


def read_llama(settings: HuggingFaceSettings) -> ModelFields:
    """Returns fields of `ModelConfig`; see `Family.read_fields`."""
    fields = llama_layout.read_rotated(settings)
    return fields | {"biases": llama_layout.read_biases(settings)}


def llama_settings(config: ModelConfig) -> dict[str, Any]:
    """Returns `config.json`, as `transformers.LlamaConfig` reads it."""
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocabulary_size,
        "hidden_size": config.width,
        "intermediate_size": config.feed_forward_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_value_heads,
        "head_dim": config.head_width,
        "hidden_act": hf_settings.activation_setting(config.activation),
        "max_position_embeddings": config.maximum_positions,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rotary_base,
        "attention_bias": "out" in config.biased_projections,
        "mlp_bias": "up" in config.biased_projections,
        "tie_word_embeddings": config.tied_head,
        **token_settings(config),
    }
    scaling = config.rotary_scaling
    if not isinstance(scaling, RotaryScaling):
        return settings
    if scaling.high_frequency_factor == 0:
        settings["rope_scaling"] = {"rope_type": "linear", "factor": scaling.factor}
    else:
        settings["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_positions,
        }
    return settings


LLAMA = Family(
    model_type="llama",
    title="Llama 1 to 3.3",
    read_fields=read_llama,
    recipes=llama_layout.layout_recipes,
    write_settings=llama_settings,
    embedding_tables=llama_layout.TABLES,
    base_prefix=llama_layout.PREFIX,
    inert=llama_layout.INERT,
)
