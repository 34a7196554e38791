"""One training step, as one pure function."""

import dataclasses
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Key

from prompt_tuning.data.batches import Batch
from prompt_tuning.losses.cross_entropy import TokenLoss, token_loss
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.models.parameters import Parameters, merge, optional_key
from prompt_tuning.training.compiled import CompiledStep
from prompt_tuning.training.state import TrainState


class Sums(NamedTuple):
    """What a batch adds up to; sums, so that batches of any weight can be added.

    Attributes:
      loss: weighted negative log likelihood, in nats.
      weight: the weights.
      correct: the weights of the tokens that scored highest.
    """

    loss: Float[Array, ""]
    weight: Float[Array, ""]
    correct: Float[Array, ""]

    def metrics(self) -> dict[str, Float[Array, ""]]:
        """Mean nats and accuracy per unit of weight."""
        return {
            "loss": self.loss / self.weight,
            "accuracy": self.correct / self.weight,
        }


def token_losses(
    graph: nnx.GraphDef,
    parameters: Parameters,
    batch: Batch,
    key: Key[Array, ""] | None = None,
) -> TokenLoss:
    """Runs the model; gives the outcome `[B, m]` at each of `batch.loss_positions`.

    Args:
      graph: the model's structure.
      parameters: all of its parameters.
      batch: one batch, without an accumulation axis.
      key: for dropout; None for none.
    """
    model = cast(LanguageModel, merge(graph, parameters))
    return _token_losses(model, model.hidden(batch, key), batch)


def _token_losses(model: LanguageModel, hidden: Array, batch: Batch) -> TokenLoss:
    targets = jnp.take_along_axis(batch.targets, batch.loss_positions, axis=1)
    return token_loss(hidden, model.head_kernel(), targets)


def row_nll(
    graph: nnx.GraphDef, parameters: Parameters, batch: Batch
) -> Float[Array, "B"]:
    """The weighted negative log likelihood of each row, in nats."""
    outcome = token_losses(graph, parameters, batch)
    return jnp.sum(batch.loss_weights * outcome.nll, axis=1)


def loss_sums(
    graph: nnx.GraphDef,
    parameters: Parameters,
    batch: Batch,
    key: Key[Array, ""] | None = None,
) -> Sums:
    """What a batch adds up to; arguments as for `token_losses`."""
    return _sums(token_losses(graph, parameters, batch, key), batch)


def _sums(outcome: TokenLoss, batch: Batch) -> Sums:
    weights = batch.loss_weights
    return Sums(
        jnp.sum(weights * outcome.nll),
        jnp.sum(weights),
        jnp.sum(weights * outcome.correct),
    )


def gradients(
    graph: nnx.GraphDef,
    trained: Parameters,
    frozen: Parameters,
    batch: Batch,
    key: Key[Array, ""] | None,
) -> tuple[Parameters, Sums]:
    """The gradient of the batch's mean loss, of the trained leaves alone.

    Args:
      graph: the model's structure.
      trained: what is differentiated.
      frozen: what is not.
      batch: one batch, or micro-batches on a leading axis `A` that are added up.
      key: for dropout; None for none.
    """

    def loss_and_sums(trained):
        sums = loss_sums(graph, trained | frozen, batch, key)
        return sums.loss, sums

    if batch.tokens.ndim == 2:
        gradient, sums = jax.grad(loss_and_sums, has_aux=True)(trained)
    else:
        gradient, sums = _added_up(graph, trained, frozen, batch, key)
    return jax.tree.map(lambda leaf: leaf / sums.weight, gradient), sums


def _added_up(
    graph: nnx.GraphDef,
    trained: Parameters,
    frozen: Parameters,
    batch: Batch,
    key: Key[Array, ""] | None,
) -> tuple[Parameters, Sums]:
    """The gradient of the summed loss of micro-batches; arguments as for `gradients`.

    What all rows share runs once forth and once back: between the two, micro-batches
    add up their gradients at what it gave.
    """

    def run_prefix(trained):
        model = cast(LanguageModel, merge(graph, trained | frozen))
        return model.prefix(optional_key(key, "prefix"))

    def loss_and_sums(trained, prefix, batch, key):
        model = cast(LanguageModel, merge(graph, trained | frozen))
        hidden = model.hidden(batch, key, prefix=prefix)
        sums = _sums(_token_losses(model, hidden, batch), batch)
        return sums.loss, sums

    def add(total, xs):
        micro_batch, index = xs
        micro_key = None if key is None else jax.random.fold_in(key, index)
        differentiate = jax.grad(loss_and_sums, argnums=(0, 1), has_aux=True)
        outcome = differentiate(trained, prefix, micro_batch, micro_key)
        return jax.tree.map(jnp.add, total, outcome), None

    prefix, pull_back = jax.vjp(run_prefix, trained)
    # In float32 whatever the model computes in: bfloat16 would stop growing.
    zeros = jax.tree.map(
        lambda leaf: jnp.zeros_like(leaf, jnp.promote_types(leaf.dtype, jnp.float32)),
        (trained, prefix),
    )
    start = (zeros, Sums(*(jnp.zeros(()) for _ in Sums._fields)))
    xs = (batch, jnp.arange(batch.tokens.shape[0]))
    ((own, at_prefix), sums), _ = jax.lax.scan(add, start, xs)
    at_prefix = jax.tree.map(lambda g, leaf: g.astype(leaf.dtype), at_prefix, prefix)
    (through_prefix,) = pull_back(at_prefix)
    return jax.tree.map(jnp.add, own, through_prefix), sums


def update(
    state: TrainState,
    gradient: Parameters,
    sums: Sums,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
    """Moves the trained parameters by a gradient.

    Args:
      state: before the step.
      gradient: of the trained leaves.
      sums: what the step's batch adds up to.
      optimizer: of the trained parameters.

    Returns:
      the next state, and the metrics of `train_step`.
    """
    with jax.named_scope("update"):
        updates, optimizer_state = optimizer.update(
            gradient, state.optimizer_state, state.trained
        )
        trained = optax.apply_updates(state.trained, updates)
    metrics = sums.metrics() | {"gradient_norm": optax.tree.norm(gradient)}
    prompts = [leaf for path, leaf in state.trained.items() if "/prompt/" in path]
    if prompts:
        norms = [jnp.linalg.norm(prompt, axis=-1).ravel() for prompt in prompts]
        metrics["prompt_norm"] = jnp.concatenate(norms).mean()
    following = dataclasses.replace(
        state,
        trained=cast(Parameters, trained),
        optimizer_state=optimizer_state,
        step=state.step + 1,
    )
    return following, metrics


def train_step(
    state: TrainState,
    frozen: Parameters,
    batch: Batch,
    *,
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    dropout: bool,
) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
    """Moves the trained parameters once.

    Args:
      state: what changes.
      frozen: what does not; an argument, so that it is not baked into the program.
      batch: one batch, or micro-batches on a leading axis.
      graph: the model's structure.
      optimizer: of the trained parameters.
      dropout: whether the model drops out.

    Returns:
      the next state, and the metrics of this step's batch before the update: `loss`
      (nats) and `accuracy` per unit of weight, `gradient_norm`, and where prompts are
      trained `prompt_norm`, the mean norm of their vectors.
    """
    key = step_key(state, dropout)
    gradient, sums = gradients(graph, state.trained, frozen, batch, key)
    return update(state, gradient, sums, optimizer)


def step_key(state: TrainState, dropout: bool) -> Key[Array, ""] | None:
    """The key of the state's next step; None without dropout."""
    return jax.random.fold_in(state.key, state.step) if dropout else None


def compile_step(
    graph: nnx.GraphDef, optimizer: optax.GradientTransformation, *, dropout: bool
) -> CompiledStep:
    """The jitted step; the state given to it is used up."""

    def step(state: TrainState, frozen: Parameters, batch: Batch):
        return train_step(
            state, frozen, batch, graph=graph, optimizer=optimizer, dropout=dropout
        )

    return CompiledStep(step)
