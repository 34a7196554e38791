"""Answers inside a prompt of examples, as extra targets of a batch."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from prompt_tuning.core.batch import Batch
from prompt_tuning.models.decoder_only import DecoderOnly
from prompt_tuning.models.language_model import LanguageModel, Prefix
from prompt_tuning.prompts.cpt import ContextPrompt


def learns_context(model: LanguageModel) -> bool:
    """Tests whether the loss counts answers inside the model's prompt."""
    prompt = model.prompts().get("decoder")
    return isinstance(prompt, ContextPrompt) and bool(prompt.answers.ids)


def with_context_answers(
    model: LanguageModel,
    hidden: Float[Array, "B m D"],
    batch: Batch,
    prefix: Prefix,
) -> tuple[Float[Array, "B _ D"], Batch]:
    """Adds the answers inside the prompt to the targets of every example.

    Each example of a packed row adds them; rows that only fill up a batch do not. The
    model must satisfy `learns_context`, and `hidden` predicts the batch's targets.
    """
    prompt = model.prompts()["decoder"]
    assert isinstance(prompt, ContextPrompt)
    assert isinstance(model, DecoderOnly)  # `check_methods` has refused others
    positions, ids, weights = map(jnp.asarray, prompt.answers)
    predicting = model.prompt_states(prefix)[:, positions - 1]  # [1, n, D]
    rows, length = batch.targets.shape
    count = jnp.ones(rows) if batch.real_rows is None else batch.real_rows
    if batch.segment_ids is not None:
        count = batch.segment_ids.max(axis=1)

    def extend(array: Array, added: Array) -> Array:
        wide = jnp.broadcast_to(added, (rows, *added.shape[1:]))
        return jnp.concatenate([array, wide.astype(array.dtype)], axis=1)

    places = length + jnp.arange(len(ids))
    return extend(hidden, predicting), dataclasses.replace(
        batch,
        targets=extend(batch.targets, ids[None]),
        loss_positions=extend(batch.loss_positions, places[None]),
        loss_weights=extend(batch.loss_weights, count[:, None] * weights),
    )
