"""Opens the trained parts of a model's tables: rows of tokens, and a class head."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from prompt_tuning.checkpoints.stored_tensors import (
    Recipe,
    StoredTensor,
    assemble_parts,
)
from prompt_tuning.core.array_slices import whole
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_choices import ClassProblem, Pooling
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import named_key
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.data.text.tokenizers import Tokenizer
from prompt_tuning.families import class_labels
from prompt_tuning.families.class_labels import ClassLayers
from prompt_tuning.families.hf_folder import as_tagger, find_family, find_recipes
from prompt_tuning.pretrained.source import open_checkpoint
from prompt_tuning.pretrained.token_tables import check_one_device, open_tokens
from prompt_tuning.pretrained.tuning import PromptPair, Tuning
from prompt_tuning.prompts.class_rows import ClassRows, initial_rows
from prompt_tuning.settings.class_head import ClassHead
from prompt_tuning.settings.pretrained import Pretrained

VALUE = "value"
"""Name of the number of a regression, unless it has another."""


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
    _check_head(head, config, source.weights)
    if head is not None:
        config, classes = _open_classes(head, config, stored, key)
        started = dataclasses.replace(started, classes=classes)
    if tuning.tokens is not None:
        check_one_device(source.weights, on_mesh)
        arguments = (tuning.tokens, config, tokenizer, recipes, stored)
        config, tokenizer, rows = open_tokens(*arguments)
        started = dataclasses.replace(started, tokens=rows)
    return config, tokenizer, started


def _open_classes(
    spec: ClassHead,
    config: ModelConfig,
    stored: Mapping[str, StoredTensor],
    key: Key[Array, ""],
) -> tuple[ModelConfig, ClassRows]:
    """Replaces a model's output head by one that scores classes.

    Returns the config of the model with the head, and the head at its initial values.

    Raises:
      InputError: if no labels are known, or the model is an encoder-decoder.
    """
    labels, problem = _labels(spec, config), spec.problem or config.problem
    tags, pooling = problem == "tokens", _pooling(spec, config, problem)
    layers = find_family(config).class_layers.of(problem)
    _check_architecture(layers, config)
    if spec.dense and not layers.dense:
        raise InputError(
            "ClassHead.dense is True, but only encoders' heads of whole texts, and "
            "ModernBERT's, have a dense layer: leave it out"
        )
    head = layers.recipes(stored)

    def read(path: str, *shape: int) -> np.ndarray:
        dtype = np.dtype(np.float32)
        blocks = [whole(shape)]
        return assemble_parts(path, shape, dtype, head[path], stored, blocks)[0]

    count, width = len(labels), config.width
    if len(config.labels) == count and tags == (config.problem == "tokens"):
        order = _order(labels, config.labels)
        kernel = jnp.asarray(read(class_labels.HEAD, count, width)[order])
        bias = (
            jnp.asarray(read(class_labels.BIAS, count)[order])
            if layers.has_bias
            else None
        )
    else:
        kernel = initial_rows(named_key(key, "class_head"), count, width)
        bias = jnp.zeros(count) if layers.has_bias else None
    dense = dense_bias = dense_norm = None
    has_dense = layers.dense and head[class_labels.DENSE].sources[0] in stored
    if layers.dense and (spec.dense or layers.saved or not has_dense):
        dense = initial_rows(named_key(key, "class_dense"), width, width)
        dense_bias = jnp.zeros(width) if layers.bias else None
        dense_norm = jnp.ones(width) if layers.norm else None
        if has_dense:
            dense = jnp.asarray(read(class_labels.DENSE, width, width))
            dense_bias = (
                jnp.asarray(read(class_labels.DENSE_BIAS, width))
                if layers.bias
                else None
            )
            dense_norm = (
                jnp.asarray(read(class_labels.DENSE_NORM, width))
                if layers.norm
                else None
            )
    # The model itself has no other head than the trained one.
    fields = {**layers.fields, "labels": labels, "problem": problem}
    fields |= {"tied_head": True, "head_bias": False}
    fields |= {"pooling": "last", "unscored_end": None} if tags else {}
    rows = ClassRows(kernel, pooling, bias, dense, dense_bias, dense_norm)
    return dataclasses.replace(config, **fields), rows


def _check_architecture(layers: ClassLayers, config: ModelConfig) -> None:
    """Checks that transformers has such a head for models of the family."""
    if config.architecture == "encoder_decoder" and not layers.dense:
        raise InputError(
            "ClassHead is for decoder-only models, encoders, whole texts in BART "
            "and T5, and words in T5, and this is an encoder-decoder "
            f"({config.family}): rank the texts of its labels instead, by "
            f"{how_to_set('Evaluation.labels', ['LABEL'])}"
        )


def _pooling(spec: ClassHead, config: ModelConfig, problem: ClassProblem) -> Pooling:
    if problem == "tokens":
        if spec.pooling not in (None, "last"):
            raise InputError(
                f"ClassHead.pooling is {spec.pooling!r}, but each token is scored by "
                "its own state (ClassHead.problem is 'tokens'): leave pooling out, or "
                "set it to 'last'"
            )
        return "last"
    pooling = spec.pooling or config.pooling
    if pooling != "last" and config.architecture == "encoder_decoder":
        raise InputError(
            f"ClassHead.pooling is {pooling!r}, but the head of an encoder-decoder "
            "reads its decoder's last state: leave it out, or set it to 'last'"
        )
    if pooling == "first" and not config.bidirectional:
        raise InputError(
            "ClassHead.pooling is 'first', but the first state of a decoder has read "
            "no other token: set it to 'last' or 'mean'"
        )
    return pooling


def _labels(spec: ClassHead, config: ModelConfig) -> tuple[str, ...]:
    numbers = (spec.problem or config.problem) == "regression"
    labels = tuple(spec.labels or config.labels or ((VALUE,) if numbers else ()))
    if not labels:
        raise InputError(
            "ClassHead.labels is None, and the model has no head of classes whose "
            "labels it could be: give the names of the classes by "
            f"{how_to_set('ClassHead.labels', ['LABEL'])}"
        )
    return labels


def _order(labels: Sequence[str], stored: Sequence[str]) -> list[int]:
    """Returns the stored row of each label: its own, or by index if names differ."""
    names = [label.strip() for label in stored]
    wanted = [label.strip() for label in labels]
    if sorted(wanted) != sorted(names):
        return list(range(len(labels)))
    return [names.index(label) for label in wanted]


def _check_head(spec: ClassHead | None, config: ModelConfig, weights: str) -> None:
    """Checks that a model has no class head, or that its weights are where it can.

    Raises:
      InputError: if its weights are not on the device.
    """
    if (spec or config.labels) and weights != "device":
        raise InputError(
            f"Pretrained.weights is {weights!r}, but a class head needs the whole "
            "model on its devices: leave one of them out"
        )
