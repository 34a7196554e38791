"""A random model of the Llama case, for the cases without PEFT."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.pretrained.prompted_model import PromptedModel, open_pretrained
from prompt_tuning.pretrained.tuning import Tuning
from prompt_tuning.prompts.soft import SoftPrompt
from prompt_tuning.settings.pretrained import Pretrained
from scripts.bench.cases import LLAMA_CONFIG
from scripts.random_model import write_random_model


def write_llama(folder: Path, **changes: Any) -> None:
    """Writes a random model as a Hugging Face folder.

    Args:
      folder: output folder.
      changes: fields of `ModelConfig` that differ from the Llama case.
    """
    shape = LLAMA_CONFIG
    config = ModelConfig(
        family="llama",
        architecture="decoder_only",
        vocabulary_size=shape["vocab_size"],
        width=shape["hidden_size"],
        feed_forward_width=shape["intermediate_size"],
        layers=shape["num_hidden_layers"],
        heads=shape["num_attention_heads"],
        key_value_heads=shape["num_key_value_heads"],
        head_width=shape["hidden_size"] // shape["num_attention_heads"],
        norm="rms",
        positions="rotary",
        maximum_positions=shape["max_position_embeddings"],
        activation="silu",
        gated=True,
        tied_head=False,
    )
    write_random_model(folder, dataclasses.replace(config, **changes))


def open_prompted(
    model: Path, prompt: int, tokenizer: str | None = None
) -> PromptedModel:
    """Opens a model with a prompt of `prompt` vectors."""
    return open_pretrained(
        Pretrained(checkpoint=str(model), tokenizer=tokenizer),
        Tuning(prompt=functools.partial(SoftPrompt, length=prompt)),
        key=jax.random.key(0),
    )
