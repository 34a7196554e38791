"""A model's losses on a batch."""

import dataclasses
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from prompt_tuning.core import intermediates
from prompt_tuning.core.batch import Batch, LabelBatch
from prompt_tuning.core.parameters import Parameters, merge, optional_key
from prompt_tuning.losses.contrastive import mean_vectors
from prompt_tuning.losses.cross_entropy import TokenLoss, token_loss
from prompt_tuning.losses.objective import (
    AnySums,
    HeldOutObjective,
    Objective,
    target_losses,
)
from prompt_tuning.losses.token_objective import NATS_PER_WEIGHT
from prompt_tuning.models.decoder_only import DecoderOnly
from prompt_tuning.models.language_model import LanguageModel, Prefix
from prompt_tuning.prompts.cpt import ContextPrompt


def token_losses(
    graph: nnx.GraphDef,
    parameters: Parameters,
    batch: Batch,
    key: Key[Array, ""] | None = None,
) -> TokenLoss:
    """Runs the model on one batch; returns losses `[B, m]` at its `loss_positions`."""
    model = merge_model(graph, parameters)
    return target_losses(model.hidden(batch, key), model.output_head(), batch)


def pooled_states(
    graph: nnx.GraphDef, parameters: Parameters, batch: Batch
) -> Float[Array, "B D"]:
    """Averages the states at a batch's loss positions, weighted by loss weights.

    They are taken after the final norm, before an encoder's transform.
    """
    model = _without_transform(merge_model(graph, parameters))
    return mean_vectors(model.hidden(batch), batch.loss_weights)


def _without_transform(model: LanguageModel) -> LanguageModel:
    if model.head is not None:
        model.head.transform = None
    return model


class HeldOutLosses(NamedTuple):
    """Losses at the positions that have a loss weight, `[B, m]`.

    Attributes:
      nll: cross-entropy of the target, in nats.
      correct: whether no token scores higher than the target.
      objective: loss of the objective.
    """

    nll: Float[Array, "B m"]
    correct: Bool[Array, "B m"]
    objective: Float[Array, "B m"]


def held_out_losses(
    objective: HeldOutObjective,
    graph: nnx.GraphDef,
    parameters: Parameters,
    batch: Batch,
) -> HeldOutLosses:
    """Runs the model once for both the cross-entropy and an objective."""
    model = merge_model(graph, parameters)
    hidden, head = model.hidden(batch), model.output_head()
    losses = target_losses(hidden, head, batch)
    objective_losses = objective.token_losses(hidden, head, batch, parameters)
    return HeldOutLosses(losses.nll, losses.correct, objective_losses.nll)


def merge_model(graph: nnx.GraphDef, parameters: Parameters) -> LanguageModel:
    """Returns the model with the given parameters."""
    return cast(LanguageModel, merge(graph, parameters))


def label_nll(
    graph: nnx.GraphDef, parameters: Parameters, batch: LabelBatch
) -> Float[Array, "B C"]:
    """Computes the negative log likelihood of each label after its text, in nats."""
    return label_losses(graph, parameters, batch)[..., 0]


def class_nll(
    graph: nnx.GraphDef, parameters: Parameters, batch: LabelBatch
) -> Float[Array, "B C"]:
    """Computes the negative log likelihood of each class of a class head, in nats.

    For exclusive classes it comes from one softmax, for others from a sigmoid each; for
    a regression it is minus the predicted number. The batch's labels are not read: one
    token per text is enough.
    """
    model = merge_model(graph, parameters)
    first, _ = model.label_states(batch)
    scores = model.logits(first)
    if model.config.problem == "regression":
        return -scores
    if model.config.problem == "multi_label":
        return jax.nn.softplus(-scores)
    return -jax.nn.log_softmax(scores)


def tag_nll(
    graph: nnx.GraphDef, parameters: Parameters, batch: Batch
) -> Float[Array, "B m C"]:
    """Computes the negative log likelihood of each class at each learned token."""
    model = merge_model(graph, parameters)
    return -jax.nn.log_softmax(model.logits(model.hidden(batch)))


def label_losses(
    graph: nnx.GraphDef, parameters: Parameters, batch: LabelBatch
) -> Float[Array, "B C 2"]:
    """Computes `label_nll`, and for each label how many of its tokens are wrong.

    A token is wrong if another one scores higher.
    """
    model = merge_model(graph, parameters)
    first, later = model.label_states(batch)
    # All labels of a text choose their first token from one distribution, [B, V].
    logprobs = jax.nn.log_softmax(model.logits(first))
    chosen = jnp.take_along_axis(logprobs, batch.labels[:, :, 0], axis=1)  # [B, C]
    wrong = (chosen < logprobs.max(axis=1, keepdims=True)).astype(chosen.dtype)
    if later is None:
        return jnp.stack([-chosen, wrong], axis=-1)
    targets = batch.labels[:, :, 1:]  # [B, C, W - 1]
    states = later.reshape(*targets.shape, later.shape[-1])
    losses = token_loss(states, model.output_head(), targets)
    real = jnp.arange(1, batch.labels.shape[2]) < batch.label_lengths[..., None]
    nll = jnp.sum(losses.nll, axis=2, where=real) - chosen
    return jnp.stack([nll, wrong + jnp.sum(real & ~losses.correct, axis=2)], axis=-1)


def greedy_tokens(
    graph: nnx.GraphDef, parameters: Parameters, batch: LabelBatch
) -> Int[Array, "B W"]:
    """Finds the most probable token at each place of each text's only label.

    The label's tokens before that place are given.
    """
    model = merge_model(graph, parameters)
    first, later = model.label_states(batch)
    states = first[:, None]  # [B, W, D]
    if later is not None:
        states = jnp.concatenate([states, later], axis=1)

    def choose(state: Float[Array, "B D"]) -> Int[Array, "B"]:
        return jnp.argmax(model.token_logits(state), axis=-1)

    # One place after the other, because scores of all places may be gigabytes.
    return jax.lax.map(choose, jnp.swapaxes(states, 0, 1)).T


def loss_sums(
    graph: nnx.GraphDef,
    parameters: Parameters,
    batch: Batch,
    key: Key[Array, ""] | None = None,
    objective: Objective = NATS_PER_WEIGHT,
    prefix: Prefix = None,
) -> AnySums:
    """Computes an objective's sums over one batch, without an accumulation axis."""
    model = merge_model(graph, parameters)
    if objective.embeds is not None:
        model = _without_transform(model)
    in_context = learns_context(model)
    if in_context and prefix is None:
        prefix = model.prefix(optional_key(key, "prefix"))
    with intermediates.capture(objective.intermediates) as arrays:
        hidden = model.hidden(batch, key, prefix=prefix)
    if in_context:
        hidden, batch = with_context_answers(model, hidden, batch, prefix)
    sums = objective.sums(hidden, model.output_head(), batch, parameters)
    if not objective.intermediates:
        return sums
    return sums._replace(loss=sums.loss + objective.intermediate_loss(arrays, batch))


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
