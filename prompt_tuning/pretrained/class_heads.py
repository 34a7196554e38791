"""Opens the class head that a run trains in the place of a model's output head."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from prompt_tuning.checkpoints.stored_table import StoredTable
from prompt_tuning.checkpoints.stored_tensors import Recipe, StoredTensor
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import named_key
from prompt_tuning.families.class_labels import HEAD, OF_TOKENS
from prompt_tuning.prompts.class_head import ClassHead, ClassRows, initial_rows


def open_classes(
    spec: ClassHead,
    config: ModelConfig,
    recipes: Mapping[str, Recipe],
    stored: Mapping[str, StoredTensor],
    key: Key[Array, ""],
) -> tuple[ModelConfig, ClassRows]:
    """Replaces a model's output head by one that scores classes.

    Args:
      spec: the head.
      config: config of the frozen model.
      recipes: recipes of its parameters.
      stored: stored tensors of its checkpoint.
      key: random key of the run.

    Returns:
      the config of the model with the head, and the head at its initial values.

    Raises:
      InputError: if no labels are known, or the model is an encoder-decoder.
    """
    labels = tuple(spec.labels or config.labels)
    if not labels:
        raise InputError(
            "ClassHead.labels is None, and the model has no head of classes whose "
            "labels it could be: give the names of the classes (--labels)"
        )
    if config.architecture != "decoder_only":
        raise InputError(
            "ClassHead is for decoder-only models, and this is an encoder-decoder: "
            "rank the texts of its labels instead, by Evaluation.labels (--labels)"
        )
    if len(config.labels) == len(labels):
        shape = (len(labels), config.width)
        table = np.asarray(StoredTable(HEAD, shape, recipes[HEAD], stored))
        kernel = jnp.asarray(table[_order(labels, config.labels)])
    else:
        kernel = initial_rows(named_key(key, "class_head"), len(labels), config.width)
    # The model itself has no other head than the trained one.
    fields = {**OF_TOKENS, "labels": labels, "tied_head": True}
    return dataclasses.replace(config, **fields), ClassRows(kernel, spec.pooling)


def _order(labels: Sequence[str], stored: Sequence[str]) -> list[int]:
    """Returns the stored row of each label: its own, or by number if names differ."""
    names = [label.strip() for label in stored]
    wanted = [label.strip() for label in labels]
    if sorted(wanted) != sorted(names):
        return list(range(len(labels)))
    return [names.index(label) for label in wanted]


def check_head(
    spec: ClassHead | None, config: ModelConfig, weights: str, mesh: bool
) -> None:
    """Checks that a model has no class head, or can have one where its weights are.

    Args:
      spec: the head that a run trains; None for none.
      config: config of the checkpoint, which may have a head of classes itself.
      weights: `Pretrained.weights`.
      mesh: whether the model is on a mesh.

    Raises:
      InputError: if it is on a mesh, or its weights are not on the device.
    """
    if (spec or config.labels) and (mesh or weights != "device"):
        found = "Run.mesh is set" if mesh else f"Pretrained.weights is {weights!r}"
        raise InputError(
            f"{found}, but a class head needs the whole model on one device: leave one "
            "of them out"
        )
