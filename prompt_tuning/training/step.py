"""One training step, as one pure function."""

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
from prompt_tuning.models.scoring import loss_sums, merged_model
from prompt_tuning.sharding.array_placement import Placement
from prompt_tuning.sharding.mesh_layout import MeshLayout
from prompt_tuning.sharding.shard_map import gradient_and_sums
from prompt_tuning.training.state import TrainState

PROMPT = "/prompt/prompt"
"""How the paths of prompt vectors end."""

Metrics = dict[str, Float[Array, ""]]

Outputs = TypeVar("Outputs")
"""A tree of floating arrays; so is what their gradients are given in."""


def gradients(
    graph: nnx.GraphDef,
    trained: Parameters,
    frozen: Parameters,
    batch: Batch,
    key: Key[Array, ""] | None,
    objective: Objective = NATS_PER_WEIGHT,
    layout: MeshLayout | None = None,
) -> tuple[Parameters, LossSums]:
    """The gradient of the batch's loss, of the trained leaves alone.

    The loss is what the objective makes of the batch, and once the prompt's penalty.

    Args:
      graph: the model's structure.
      trained: what is differentiated.
      frozen: what is not.
      batch: one batch, or micro-batches on a leading axis `A` that are added up.
      key: for dropout; None for none.
      objective: what is descended.
      layout: how the parameters lie on a mesh; None on one device.

    Returns:
      the gradient, and what the batch adds up to, the penalty not among it.
    """

    def outputs(parameters, batch, key, prefix):
        return loss_sums(graph, parameters, batch, key, objective, prefix)

    micro_batches = batch.tokens.shape[:-2]
    share = jnp.full(micro_batches, 1 / jnp.asarray(objective.divisor(batch), float))
    of_sums = LossSums(share, jnp.zeros_like(share), jnp.zeros_like(share))

    def run(trained, frozen, batch, key, of_sums):
        return value_and_gradient(graph, outputs, of_sums, trained, frozen, batch, key)

    given = (trained, frozen, batch, key, of_sums)
    if layout is None:
        gradient, sums = run(*given)
    else:
        gradient, sums = gradient_and_sums(layout, graph, run, *given)
    if merged_model(graph, trained | frozen).has_penalty:
        own = jax.grad(lambda leaves: merged_model(graph, leaves | frozen).penalty())(
            trained
        )
        gradient = jax.tree.map(jnp.add, gradient, own)
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
    """Runs a batch's outputs forth, and the gradients at them back.

    Every step is this one, whatever its outputs are: the sums of an objective, or those
    that an `OutputStep` names.

    Args:
      graph: the model's structure.
      outputs: gives a tree of floating arrays, of all parameters, a batch without an
        accumulation axis, a key, and what the model's `prefix` gave or None.
      output_gradients: of each output; of micro-batches on a leading axis `A`.
      trained: what is differentiated.
      frozen: what is not.
      batch: one batch, or micro-batches on a leading axis `A`.
      key: for dropout; None for none.

    Returns:
      the gradient of the trained leaves, micro-batches added up, and the outputs, of
      micro-batches on a leading axis.
    """
    if batch.tokens.ndim > 2:
        return _added_up(graph, outputs, output_gradients, trained, frozen, batch, key)
    found, pull_back = jax.vjp(
        lambda trained: outputs(trained | frozen, batch, key, None), trained
    )
    (gradient,) = pull_back(_typed(output_gradients, found))
    return gradient, found


def _typed(values: Outputs, like: Outputs) -> Outputs:
    """The values in the types of other arrays."""
    return jax.tree.map(lambda value, other: value.astype(other.dtype), values, like)


def _added_up(
    graph: nnx.GraphDef,
    outputs: Callable[[Parameters, Batch, Key[Array, ""] | None, Prefix], Outputs],
    output_gradients: Outputs,
    trained: Parameters,
    frozen: Parameters,
    batch: Batch,
    key: Key[Array, ""] | None,
) -> tuple[Parameters, Outputs]:
    """`value_and_gradient` of micro-batches.

    What all rows share runs once forth and once back: between the two, micro-batches
    add up their gradients at what it gave.
    """

    def run_prefix(trained):
        return merged_model(graph, trained | frozen).prefix(optional_key(key, "prefix"))

    def add(total, xs):
        micro_batch, of_outputs, index = xs
        own_key = None if key is None else jax.random.fold_in(key, index)

        def run(trained, prefix):
            return outputs(trained | frozen, micro_batch, own_key, prefix)

        found, pull_back = jax.vjp(run, trained, prefix)
        own = pull_back(_typed(of_outputs, found))
        return jax.tree.map(jnp.add, total, own), found

    prefix, pull_back = jax.vjp(run_prefix, trained)
    # In float32 whatever the model computes in: bfloat16 would stop growing.
    zeros = jax.tree.map(
        lambda leaf: jnp.zeros_like(leaf, jnp.promote_types(leaf.dtype, jnp.float32)),
        (trained, prefix),
    )
    xs = (batch, output_gradients, jnp.arange(batch.tokens.shape[0]))
    (own, at_prefix), found = jax.lax.scan(add, zeros, xs)
    (through_prefix,) = pull_back(_typed(at_prefix, prefix))
    return jax.tree.map(jnp.add, own, through_prefix), found


def batch_metrics(
    graph: nnx.GraphDef,
    parameters: Parameters,
    batch: Batch,
    sums: LossSums,
    objective: Objective = NATS_PER_WEIGHT,
) -> Metrics:
    """What is told of a step's batch: the loss that its gradient is of, and accuracy.

    Args:
      graph: the model's structure.
      parameters: all of its parameters.
      batch: one batch, or micro-batches on a leading axis.
      sums: what it adds up to.
      objective: what is descended.
    """
    loss = sums.loss / objective.divisor(batch)
    model = merged_model(graph, parameters)
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
    """Moves the trained parameters by a gradient.

    Args:
      state: before the step.
      gradient: of the trained leaves.
      metrics: of the step's batch.
      optimizer: of the trained parameters.
      placement: where the parameters lie on a mesh; None on one device.

    Returns:
      the next state, and the metrics of `train_step`.
    """
    if placement is not None:
        # What pads a vocabulary is no parameter: the optimiser knows nothing of it.
        state, gradient = placement.unpad((state, gradient))
    with jax.named_scope("update"):
        updates, optimizer_state = optimizer.update(
            gradient, state.optimizer_state, state.trained
        )
        trained = optax.apply_updates(state.trained, updates)
    metrics = metrics | {"gradient_norm": optax.tree.norm(gradient)}
    if _prompts(state.trained):
        metrics["prompt_norm"] = prompt_norm(state.trained)
    following = dataclasses.replace(
        state,
        trained=cast(Parameters, trained),
        optimizer_state=optimizer_state,
        step=state.step + 1,
    )
    if placement is not None:
        following = placement.constrain(placement.pad(following))
    return following, metrics


def prompt_norm(parameters: Parameters) -> Float[Array, ""]:
    """The mean norm of the prompts' vectors; 0 where there are none."""
    prompts = _prompts(parameters)
    if not prompts:
        return jnp.zeros(())
    squares = [jnp.sum(jnp.square(prompt), axis=-1).ravel() for prompt in prompts]
    # The gradient of a vector of zeros would be none.
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
    """Moves the trained parameters once.

    Args:
      state: what changes.
      frozen: what does not; an argument, so that it is not baked into the program.
      batch: one batch, or micro-batches on a leading axis.
      graph: the model's structure.
      optimizer: of the trained parameters.
      dropout: whether the model drops out.
      objective: what is descended.
      placement: where the parameters lie on a mesh; None on one device.

    Returns:
      the next state, and the metrics of this step's batch before the update: `loss`,
      what is descended (plain nats per unit of weight if the objective is no other),
      `accuracy` (of tokens by weight, or of examples with classes), `penalty` of a
      prompt that has one, which is in the loss too, `gradient_norm`, and where prompts
      are trained `prompt_norm`, the mean norm of their vectors.
    """
    key = step_key(state, dropout)
    layout = None if placement is None else placement.layout
    gradient, sums = gradients(
        graph, state.trained, frozen, batch, key, objective, layout
    )
    metrics = batch_metrics(graph, state.trained | frozen, batch, sums, objective)
    return update(state, gradient, metrics, optimizer, placement)


def step_key(state: TrainState, dropout: bool) -> Key[Array, ""] | None:
    """The key of the state's next step; None without dropout."""
    return jax.random.fold_in(state.key, state.step) if dropout else None


def compile_step(
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    *,
    dropout: bool,
    objective: Objective = NATS_PER_WEIGHT,
    placement: Placement | None = None,
) -> CompiledStep:
    """The jitted step; the state given to it is used up."""
    step = functools.partial(
        train_step,
        graph=graph,
        optimizer=optimizer,
        dropout=dropout,
        objective=objective,
        placement=placement,
    )
    return CompiledStep(step)
