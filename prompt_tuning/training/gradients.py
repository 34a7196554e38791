"""The gradient of a batch's loss, computed in one program."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Key

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.parameters import Parameters, optional_key
from prompt_tuning.losses.objective import AnySums, LossSums, MeasuredSums, Objective
from prompt_tuning.losses.token_objective import NATS_PER_WEIGHT
from prompt_tuning.models.language_model import Prefix
from prompt_tuning.models.scoring import loss_sums, merge_model
from prompt_tuning.sharding.mesh_layout import MeshLayout
from prompt_tuning.sharding.shard_map import gradient_on_shards

Outputs = TypeVar("Outputs")
"""A tree of floating-point arrays; output gradients have the same structure."""


def gradients(
    graph: nnx.GraphDef,
    trained: Parameters,
    frozen: Parameters,
    batch: Batch,
    key: Key[Array, ""] | None,
    objective: Objective = NATS_PER_WEIGHT,
    layout: MeshLayout | None = None,
) -> tuple[Parameters, AnySums]:
    """Computes the gradient of a batch's loss with respect to the trained parameters.

    Use it in loops of your own that change the gradient; `train_step` combines it with
    metrics and `update`. The loss is the objective's, plus the prompt's penalty once
    per batch.

    Args:
      graph: the model's structure, `model.graph`.
      trained: parameters to differentiate.
      frozen: all other parameters.
      batch: one batch, or micro-batches on a leading axis `A`, whose gradients are
        summed.
      key: dropout key; None without dropout.
      objective: the training objective.
      layout: the model's layout on a mesh; None on one device.

    Returns:
      the gradient, and the objective's sums over the batch, without the penalty.

    Examples:
      >>> attached = model.attach(pt.SoftPrompt(length=5))
      >>> trained, frozen = attached.partition()
      >>> batch = next(attached.batches(pairs, batch_size=8))
      >>> compute = functools.partial(pt.gradients, attached.graph, key=None)
      >>> gradient, sums = jax.jit(compute)(trained, frozen, batch)
      >>> gradient["decoder/prompt/prompt"].shape
      (5, 128)
    """
    gradient, sums = objective_gradient(
        graph, trained, frozen, batch, key, objective, layout
    )
    return add_penalty(graph, trained, frozen, gradient), sums


def objective_gradient(
    graph: nnx.GraphDef,
    trained: Parameters,
    frozen: Parameters,
    batch: Batch,
    key: Key[Array, ""] | None,
    objective: Objective = NATS_PER_WEIGHT,
    layout: MeshLayout | None = None,
) -> tuple[Parameters, AnySums]:
    """Computes `gradients` without the penalty's."""

    def outputs(parameters, batch, key, prefix):
        return loss_sums(graph, parameters, batch, key, objective, prefix)

    # The loss is the sum over its divisor: 1 / divisor is the gradient at each
    # micro-batch's loss sum. Nothing is propagated from the other sums.
    micro_batches = batch.tokens.shape[:-2]  # () or (A,)
    share = jnp.full(micro_batches, 1 / jnp.asarray(objective.divisor(batch), float))
    zero = jnp.zeros_like(share)
    sum_gradients = LossSums(share, zero, zero)
    if objective.measured:
        measured = dict.fromkeys(objective.measured, zero)
        sum_gradients = MeasuredSums(*sum_gradients, measured)

    def run(trained, frozen, batch, key, sum_gradients):
        return *value_and_gradient(
            graph, outputs, sum_gradients, trained, frozen, batch, key
        ), ()

    if layout is None:
        gradient, sums, _ = run(trained, frozen, batch, key, sum_gradients)
    else:
        whole = key, sum_gradients
        gradient, sums, _ = gradient_on_shards(
            layout, graph, run, trained, frozen, [batch], whole
        )
    return gradient, jax.tree.map(jnp.sum, sums)


def add_penalty(
    graph: nnx.GraphDef,
    trained: Parameters,
    frozen: Mapping[str, Any],
    gradient: Parameters,
) -> Parameters:
    """Adds the gradient of the prompt's penalty, if it has one.

    The penalty does not depend on rows: it is added once, outside of micro-batches and
    devices. For parameters that are not on the device, `frozen` has the shapes.
    """
    if not merge_model(graph, {**trained, **frozen}).has_penalty:
        return gradient
    penalty_gradient = jax.grad(
        lambda leaves: merge_model(graph, {**leaves, **frozen}).penalty()
    )(trained)
    return jax.tree.map(jnp.add, gradient, penalty_gradient)


def value_and_gradient(
    graph: nnx.GraphDef,
    outputs: Callable[[Parameters, Batch, Key[Array, ""] | None, Prefix], Outputs],
    output_gradients: Outputs,
    trained: Parameters,
    frozen: Parameters,
    batch: Batch,
    key: Key[Array, ""] | None,
) -> tuple[Parameters, Outputs]:
    """Computes a batch's outputs and backpropagates the given output gradients.

    All steps share this function. The outputs are an objective's sums in training, and
    the named outputs in an `OutputStep`.

    Args:
      graph: the model's structure.
      outputs: returns a tree of floating-point arrays, given all parameters, a batch
        without an accumulation axis, a key, and the result of the model's `prefix` or
        None.
      output_gradients: gradient of each output, with a leading axis `A` for
        micro-batches.
      trained: parameters to differentiate.
      frozen: all other parameters.
      batch: one batch, or micro-batches on a leading axis `A`.
      key: dropout key; None without dropout.

    Returns:
      the gradient of the trained parameters, summed over micro-batches, and the
      outputs, with a leading axis for micro-batches.
    """
    if batch.tokens.ndim > 2:
        return _accumulate(
            graph, outputs, output_gradients, trained, frozen, batch, key
        )
    values, pull_back = jax.vjp(
        lambda trained: outputs(trained | frozen, batch, key, None), trained
    )
    (gradient,) = pull_back(_cast_like(output_gradients, values))
    return gradient, values


def _cast_like(values: Outputs, like: Outputs) -> Outputs:
    return jax.tree.map(lambda value, other: value.astype(other.dtype), values, like)


def _accumulate(
    graph: nnx.GraphDef,
    outputs: Callable[[Parameters, Batch, Key[Array, ""] | None, Prefix], Outputs],
    output_gradients: Outputs,
    trained: Parameters,
    frozen: Parameters,
    batch: Batch,
    key: Key[Array, ""] | None,
) -> tuple[Parameters, Outputs]:
    """Computes `value_and_gradient` of micro-batches, one after another.

    The part of the model that all rows share (its prefix) runs forward once and
    backward once. In between, the micro-batches sum their gradients with respect to its
    result.
    """

    def run_prefix(trained):
        return merge_model(graph, trained | frozen).prefix(optional_key(key, "prefix"))

    def add(total, xs):
        # micro_batch [B, T], the gradients at its outputs, and its number
        micro_batch, micro_gradients, index = xs
        micro_key = None if key is None else jax.random.fold_in(key, index)

        def run(trained, prefix):
            return outputs(trained | frozen, micro_batch, micro_key, prefix)

        values, pull_back = jax.vjp(run, trained, prefix)
        gradient = pull_back(_cast_like(micro_gradients, values))
        return jax.tree.map(jnp.add, total, gradient), values

    prefix, pull_back = jax.vjp(run_prefix, trained)
    # Summed in float32 even if the model computes in bfloat16, where a growing sum
    # soon stops changing.
    zeros = jax.tree.map(
        lambda leaf: jnp.zeros_like(leaf, jnp.promote_types(leaf.dtype, jnp.float32)),
        (trained, prefix),
    )
    xs = (batch, output_gradients, jnp.arange(batch.tokens.shape[0]))
    (direct, prefix_gradient), values = jax.lax.scan(add, zeros, xs)
    # Trained parameters contribute directly (adapters, the text's tokens) and through
    # the prefix (prompt vectors).
    (through_prefix,) = pull_back(_cast_like(prefix_gradient, prefix))
    return jax.tree.map(jnp.add, direct, through_prefix), values
