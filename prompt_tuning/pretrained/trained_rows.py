"""Opens the trained parts of a model's tables: rows of tokens, and a class head."""

import dataclasses
from collections.abc import Mapping

from jaxtyping import Array, Key

from prompt_tuning.checkpoints.stored_tensors import Recipe, StoredTensor
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.data.text.tokenizers import Tokenizer
from prompt_tuning.families.hf_folder import as_tagger, find_recipes
from prompt_tuning.pretrained.class_heads import check_head, open_classes
from prompt_tuning.pretrained.source import open_checkpoint
from prompt_tuning.pretrained.token_tables import check_one_device, open_tokens
from prompt_tuning.pretrained.tuning import PromptPair, Tuning
from prompt_tuning.settings.class_head import ClassHead
from prompt_tuning.settings.pretrained import Pretrained


def open_tuned(
    source: Pretrained, head: ClassHead | None
) -> tuple[ModelConfig, dict[str, Recipe], dict[str, StoredTensor]]:
    """Opens a checkpoint; for a token head only the part that it reads.

    Raises:
      InputError: for a class head over a T5X checkpoint.
    """
    config, recipes, stored = open_checkpoint(source)
    if head is not None and source.config is not None:
        raise InputError(
            f"{source.checkpoint} is a T5X checkpoint, and a class head needs a "
            "Hugging Face folder: convert the checkpoint with transformers, or learn "
            "label texts instead (losses/class_cross_entropy.gin)"
        )
    if head is None or head.problem != "tokens" or as_tagger(config) is config:
        return config, recipes, stored
    config = as_tagger(config)
    return config, find_recipes(config, stored), stored


def open_rows(
    source: Pretrained,
    tuning: Tuning,
    started: PromptPair,
    opened: tuple[ModelConfig, Mapping[str, Recipe], Mapping[str, StoredTensor]],
    tokenizer: Tokenizer | None,
    *,
    key: Key[Array, ""],
    on_mesh: bool,
) -> tuple[ModelConfig, Tokenizer | None, PromptPair]:
    """Adds the rows to the prompts of a run.

    Returns:
      the model's config and tokenizer with new tokens and classes, and the prompts with
      the rows.
    """
    config, recipes, stored = opened
    head = tuning.class_head
    check_head(head, config, source.weights)
    if head is not None:
        config, classes = open_classes(head, config, stored, key)
        started = dataclasses.replace(started, classes=classes)
    if tuning.tokens is not None:
        check_one_device(source.weights, on_mesh)
        arguments = (tuning.tokens, config, tokenizer, recipes, stored)
        config, tokenizer, rows = open_tokens(*arguments)
        started = dataclasses.replace(started, tokens=rows)
    return config, tokenizer, started
