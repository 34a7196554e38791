"""Rank classification: the label that the model finds most likely (its verbalizer)."""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Float

from prompt_tuning.data.batches import build_batch
from prompt_tuning.data.buckets import round_up
from prompt_tuning.data.plan import FILLING, PlannedBatch
from prompt_tuning.data.readings import Example
from prompt_tuning.models.config import ModelConfig
from prompt_tuning.models.parameters import Parameters
from prompt_tuning.pretrained import PromptedModel
from prompt_tuning.training.step import row_nll

batch_row_nll = jax.jit(row_nll, static_argnums=0)


def rank_labels(
    model: PromptedModel,
    parameters: Parameters,
    given: Sequence[Sequence[int]],
    labels: Sequence[Sequence[int]],
    *,
    add_eos: bool,
    batch_size: int = 64,
) -> Float[np.ndarray, "n C"]:
    """The nats that each label costs after each given row; the least is the answer.

    Args:
      model: of which graph and config are used.
      parameters: all parameters by path.
      given: token ids of each example.
      labels: token ids of the `C` labels.
      add_eos: whether the end-of-sequence token counts, which tells a label from a
        longer one that begins with it.
      batch_size: rows that run together.
    """
    end = [model.config.eos_id] if add_eos and model.config.eos_id is not None else []
    examples = [
        labelled(model.config, list(row), [*label, *end])
        for row in given
        for label in labels
    ]
    # Sorted by length, so that a batch is padded little and few shapes are compiled.
    order = np.argsort([len(example.inputs) for example in examples], kind="stable")
    nats = np.zeros(len(examples))
    most = max(len(label) for label in labels) + len(end)
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        filled = np.full(batch_size, FILLING)
        filled[: len(rows)] = rows
        longest = max(len(examples[row].inputs) for row in rows)
        length = round_up(longest)
        if model.maximum_length is not None:
            length = min(length, model.maximum_length)
        targets = length if model.config.architecture == "decoder_only" else most
        planned = PlannedBatch(filled, length, targets, most)
        batch = build_batch(examples, planned, model.config.pad_id)
        found = batch_row_nll(model.graph, parameters, batch)
        nats[rows] = np.asarray(found)[: len(rows)]
    return nats.reshape(len(given), len(labels))


def labelled(config: ModelConfig, given: list[int], label: list[int]) -> Example:
    """An example in which the label alone carries weight."""
    if config.architecture == "encoder_decoder":
        return Example(
            np.array(given, np.int32),
            np.array(label, np.int32),
            np.ones(len(label), np.float32),
            0,
        )
    row = np.array([*given, *label], np.int32)
    weights = np.zeros(len(row), np.float32)
    weights[len(given) :] = 1
    return Example(row, row, weights, len(given))
