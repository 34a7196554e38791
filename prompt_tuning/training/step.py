"""One training step as a pure function: gradient, metrics and update."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Key

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.compiled_step import CompiledStep
from prompt_tuning.core.parameters import Parameters, optional_key
from prompt_tuning.losses.objective import LossSums, Objective
from prompt_tuning.losses.token_objective import NATS_PER_WEIGHT
from prompt_tuning.models.language_model import Prefix
from prompt_tuning.models.scoring import loss_sums, merge_model
from prompt_tuning.sharding.array_placement import Placement
from prompt_tuning.sharding.mesh_layout import MeshLayout
from prompt_tuning.sharding.shard_map import gradient_and_sums
from prompt_tuning.training.state import TrainState

PROMPT = "/prompt/prompt"
"""The end of the paths of prompt vectors."""

Metrics = dict[str, Float[Array, ""]]

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
) -> tuple[Parameters, LossSums]:
    """Computes the gradient of a batch's loss with respect to the trained parameters.

    For loops of your own that do something with the gradient; `train_step` is this, the
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

    def outputs(parameters, batch, key, prefix):
        return loss_sums(graph, parameters, batch, key, objective, prefix)

    # The loss is the sum over its divisor: 1 / divisor is the gradient at each
    # micro-batch's loss sum. Nothing is propagated from the other sums.
    micro_batches = batch.tokens.shape[:-2]  # () or (A,)
    share = jnp.full(micro_batches, 1 / jnp.asarray(objective.divisor(batch), float))
    sum_gradients = LossSums(share, jnp.zeros_like(share), jnp.zeros_like(share))

    def run(trained, frozen, batch, key, sum_gradients):
        return value_and_gradient(
            graph, outputs, sum_gradients, trained, frozen, batch, key
        )

    arguments = (trained, frozen, batch, key, sum_gradients)
    if layout is None:
        gradient, sums = run(*arguments)
    else:
        gradient, sums = gradient_and_sums(layout, graph, run, *arguments)
    # The penalty has no rows: it is added once, outside of micro-batches and devices.
    if merge_model(graph, trained | frozen).has_penalty:
        penalty_gradient = jax.grad(
            lambda leaves: merge_model(graph, leaves | frozen).penalty()
        )(trained)
        gradient = jax.tree.map(jnp.add, gradient, penalty_gradient)
    return gradient, LossSums(*map(jnp.sum, sums))


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
    """Casts each array to the dtype of its counterpart."""
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


def batch_metrics(
    graph: nnx.GraphDef,
    parameters: Parameters,
    batch: Batch,
    sums: LossSums,
    objective: Objective = NATS_PER_WEIGHT,
) -> Metrics:
    """Computes the loss (the value that `gradients` differentiates) and the accuracy.

    Args:
      graph: the model's structure.
      parameters: all of the model's parameters.
      batch: one batch, or micro-batches on a leading axis.
      sums: the objective's sums over the batch.
      objective: the training objective.
    """
    loss = sums.loss / objective.divisor(batch)
    model = merge_model(graph, parameters)
    if not model.has_penalty:
        return {"loss": loss, "accuracy": sums.accuracy}
    penalty = model.penalty()
    return {"loss": loss + penalty, "accuracy": sums.accuracy, "penalty": penalty}


def update(
    state: TrainState,
    gradient: Parameters,
    metrics: Metrics,
    optimizer: optax.GradientTransformation,
    placement: Placement | None = None,
) -> tuple[TrainState, Metrics]:
    """Updates the trained parameters with a gradient: the last part of `train_step`.

    Args:
      state: the state before the step.
      gradient: gradient of the trained parameters.
      metrics: metrics of the step's batch.
      optimizer: optimizer of the trained parameters.
      placement: the parameters' shardings on a mesh; None on one device.

    Returns:
      the next state, and the metrics of `train_step`.

    Examples:
      >>> trained, _ = model.attach(pt.SoftPrompt(length=5)).partition()
      >>> optimizer = optax.sgd(0.1)
      >>> state = pt.TrainState.create(trained, optimizer, jax.random.key(0))
      >>> state, metrics = pt.update(state, trained, {}, optimizer)
      >>> int(state.step), sorted(metrics)
      (1, ['gradient_norm', 'prompt_norm'])
    """
    if placement is not None:
        # The optimizer sees no padding: a norm or a mean must not include it.
        state, gradient = placement.unpad((state, gradient))
    with jax.named_scope("update"):
        updates, optimizer_state = optimizer.update(
            gradient, state.optimizer_state, state.trained
        )
        trained = optax.apply_updates(state.trained, updates)
    metrics = metrics | {"gradient_norm": optax.tree.norm(gradient)}
    if _prompts(state.trained):
        metrics["prompt_norm"] = prompt_norm(state.trained)
    next_state = dataclasses.replace(
        state,
        trained=cast(Parameters, trained),
        optimizer_state=optimizer_state,
        step=state.step + 1,
    )
    if placement is not None:
        next_state = placement.constrain(placement.pad(next_state))
    return next_state, metrics


def prompt_norm(parameters: Parameters) -> Float[Array, ""]:
    """The mean norm of the prompt vectors; 0 without prompts."""
    prompts = _prompts(parameters)
    if not prompts:
        return jnp.zeros(())
    # Each prompt [..., P, D] gives one squared norm per vector.
    squares = [jnp.sum(jnp.square(prompt), axis=-1).ravel() for prompt in prompts]
    # The square root has no finite gradient at 0, the norm of a vector of zeros.
    tiny = jnp.finfo(jnp.float32).tiny
    return jnp.sqrt(jnp.maximum(jnp.concatenate(squares), tiny)).mean()


def _prompts(parameters: Parameters) -> list[Array]:
    return [x for path, x in parameters.items() if path.endswith(PROMPT) and x.ndim]


def train_step(
    state: TrainState,
    frozen: Parameters,
    batch: Batch,
    *,
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    dropout: bool,
    objective: Objective = NATS_PER_WEIGHT,
    placement: Placement | None = None,
) -> tuple[TrainState, Metrics]:
    """Computes one training step: `(state, frozen, batch) -> (state, metrics)`.

    A pure function, for loops of your own. Compile it once with `jax.jit`, as in
    scripts/examples/own_training_loop.py; called as it is, it runs operation by
    operation.

    Args:
      state: trained parameters, optimizer state, step and key.
      frozen: frozen parameters; an argument and not a closure, because constants would
        be compiled into the program.
      batch: one batch, or micro-batches on a leading axis.
      graph: the model's structure, `model.graph`.
      optimizer: optimizer of the trained parameters.
      dropout: whether dropout is active.
      objective: the training objective.
      placement: the parameters' shardings on a mesh; None on one device.

    Returns:
      the next state, and the metrics of the batch before the update: `loss` (by default
      in nats per unit of loss weight), `accuracy` (of tokens by weight, or of examples
      with classes), `penalty` if the prompt has one (it is part of the loss),
      `gradient_norm`, and `prompt_norm` if prompts are trained: the mean norm of their
      vectors.

    Examples:
      >>> attached = model.attach(pt.SoftPrompt(length=5))
      >>> trained, frozen = attached.partition()
      >>> optimizer = optax.sgd(0.1)
      >>> state = pt.TrainState.create(trained, optimizer, jax.random.key(0))
      >>> batch = next(attached.batches(pairs, batch_size=8))
      >>> step = functools.partial(
      ...     pt.train_step, graph=attached.graph, optimizer=optimizer, dropout=False
      ... )
      >>> state, metrics = jax.jit(step)(state, frozen, batch)
      >>> sorted(metrics)
      ['accuracy', 'gradient_norm', 'loss', 'prompt_norm']
    """
    key = step_key(state, dropout)
    layout = None if placement is None else placement.layout
    gradient, sums = gradients(
        graph, state.trained, frozen, batch, key, objective, layout
    )
    metrics = batch_metrics(graph, state.trained | frozen, batch, sums, objective)
    return update(state, gradient, metrics, optimizer, placement)


def step_key(state: TrainState, dropout: bool) -> Key[Array, ""] | None:
    """The dropout key of the state's next step; None without dropout."""
    return jax.random.fold_in(state.key, state.step) if dropout else None


def compile_step(
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    *,
    dropout: bool,
    objective: Objective = NATS_PER_WEIGHT,
    placement: Placement | None = None,
    shapes: int | None = None,
) -> CompiledStep:
    """Compiles `train_step`; the step donates its `state`.

    Args:
      graph: the model's structure.
      optimizer: optimizer of the trained parameters.
      dropout: whether dropout is active.
      objective: the training objective.
      placement: the parameters' shardings on a mesh; None on one device.
      shapes: number of shapes of the batches, which is shown; None if unknown.
    """
    step = functools.partial(
        train_step,
        graph=graph,
        optimizer=optimizer,
        dropout=dropout,
        objective=objective,
        placement=placement,
    )
    return CompiledStep(step, shapes)
