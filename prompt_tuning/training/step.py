"""One training step: gradient, penalty, metrics, update.

`train_step` is the whole step as a pure function. Where no single program can compute
the gradient (streamed weights, pipeline stages), `join_step` calls another function
with the same signature, and only `finish` is compiled here.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Key

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.compilation import WeightedJit, abstract, return_freed_memory
from prompt_tuning.core.equal_functions import EqualFunction
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.core.status_line import status
from prompt_tuning.losses.objective import AnySums, MeasuredSums, Objective
from prompt_tuning.losses.token_objective import NATS_PER_WEIGHT
from prompt_tuning.models.scoring import merge_model
from prompt_tuning.sharding.array_placement import Placement
from prompt_tuning.training.gradients import add_penalty, objective_gradient
from prompt_tuning.training.state import TrainState

PROMPT = "/prompt/prompt"
"""Path suffix of prompt vectors."""

Metrics = dict[str, Float[Array, ""]]

Step = Callable[[TrainState, Parameters, Batch], tuple[TrainState, Metrics]]
"""`(state, frozen, batch) -> (state, metrics)`; donates `state`."""

Gradient = Callable[
    [Parameters, Parameters, Batch, Key[Array, ""] | None], tuple[Parameters, AnySums]
]
"""`(trained, frozen, batch, key) -> (gradient, sums)`, as `objective_gradient`."""

Finish = Callable[
    [TrainState, Parameters, Parameters, Batch, AnySums], tuple[TrainState, Metrics]
]
"""`(state, frozen, gradient, batch, sums) -> (state, metrics)`; donates `state`."""

Shapes = tuple[tuple[int, ...], ...]
"""Shapes of the arrays of a batch."""


def batch_metrics(
    graph: nnx.GraphDef,
    parameters: Parameters,
    batch: Batch,
    sums: AnySums,
    objective: Objective = NATS_PER_WEIGHT,
) -> Metrics:
    """Computes `loss`, the value that `gradients` differentiates, and `accuracy`."""
    loss = sums.loss / objective.divisor(batch)
    metrics = {"loss": loss, "accuracy": sums.accuracy}
    if isinstance(sums, MeasuredSums):
        metrics |= {name: sums.mean(total) for name, total in sums.measured.items()}
    model = merge_model(graph, parameters)
    if model.config.problem == "regression":
        del metrics["accuracy"]
    if not model.has_penalty:
        return metrics
    penalty = model.penalty()
    return metrics | {"loss": loss + penalty, "penalty": penalty}


def update(
    state: TrainState,
    gradient: Parameters,
    metrics: Metrics,
    optimizer: optax.GradientTransformation,
    placement: Placement | None = None,
) -> tuple[TrainState, Metrics]:
    """Applies a gradient to the trained parameters: the last part of `train_step`.

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
    """Returns the mean norm of the prompt vectors; 0 without prompts."""
    prompts = _prompts(parameters)
    if not prompts:
        return jnp.zeros(())
    # Each prompt [..., P, D] gives one squared norm per vector.
    squares = [jnp.sum(jnp.square(prompt), axis=-1).ravel() for prompt in prompts]
    # The square root has no finite gradient at 0, the norm of a vector of zeros.
    tiny = jnp.finfo(jnp.float32).tiny
    return jnp.sqrt(jnp.maximum(jnp.concatenate(squares), tiny)).mean()


def _prompts(parameters: Parameters) -> list[Array]:
    named = [x for path, x in parameters.items() if path.endswith(PROMPT) and x.ndim]
    return [x for x in named if x.size]  # without attention, a prefix has no keys


def finish(
    state: TrainState,
    frozen: Parameters,
    gradient: Parameters,
    batch: Batch,
    sums: AnySums,
    *,
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    objective: Objective = NATS_PER_WEIGHT,
    placement: Placement | None = None,
    absent: Mapping[str, jax.ShapeDtypeStruct] | None = None,
) -> tuple[TrainState, Metrics]:
    """Adds the penalty's gradient, computes the metrics and updates; runs no block.

    `gradient` is that of the loss without the penalty, and `sums` the objective's sums
    over the batch. `absent` has the shapes of parameters that are not on the device;
    only the model's structure needs them. The other arguments are those of
    `train_step`.
    """
    frozen = frozen | cast(Parameters, absent or {})
    gradient = add_penalty(graph, state.trained, frozen, gradient)
    metrics = batch_metrics(graph, state.trained | frozen, batch, sums, objective)
    return update(state, gradient, metrics, optimizer, placement)


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

    A pure function, for your own training loop. Compile it once with `jax.jit`, as in
    scripts/examples/own_training_loop.py; without that it runs operation by operation.

    Args:
      state: trained parameters, optimizer state, step and key.
      frozen: frozen parameters; an argument, because a closure would compile them into
        the program as constants.
      batch: one batch, or micro-batches on a leading axis.
      graph: the model's structure, `model.graph`.
      optimizer: optimizer of the trained parameters.
      dropout: whether dropout is active.
      objective: the training objective.
      placement: the parameters' shardings on a mesh; None on one device.

    Returns:
      the next state, and the batch's metrics before the update: `loss` (by default in
      nats per unit of loss weight), `accuracy` (of tokens by weight, or of examples
      with classes), `gradient_norm`, `penalty` if the prompt has one (it is part of the
      loss), and `prompt_norm`, the mean norm of the vectors, if prompts are trained.

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
    gradient, sums = objective_gradient(
        graph, state.trained, frozen, batch, key, objective, layout
    )
    return finish(
        state,
        frozen,
        gradient,
        batch,
        sums,
        graph=graph,
        optimizer=optimizer,
        objective=objective,
        placement=placement,
    )


def step_key(state: TrainState, dropout: bool) -> Key[Array, ""] | None:
    """Returns the dropout key of the next step; None without dropout."""
    return jax.random.fold_in(state.key, state.step) if dropout else None


def compile_step(
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    *,
    shapes: int | None = None,
    **choices: Any,
) -> "CompiledStep":
    """Compiles `train_step`; the step donates its `state`.

    `shapes` is the number of batch shapes, to be shown; None if unknown.
    """
    step = functools.partial(train_step, graph=graph, optimizer=optimizer, **choices)
    return CompiledStep(step, shapes)


def compile_finish(**choices: Any) -> Finish:
    """Compiles `finish`, given its keywords; it donates its `state`."""
    return jax.jit(functools.partial(finish, **choices), donate_argnums=0)


def join_step(gradient: Gradient, finish: Finish, *, dropout: bool) -> Step:
    """Returns `train_step` with a gradient from more than one program."""

    def step(
        state: TrainState, frozen: Parameters, batch: Batch
    ) -> tuple[TrainState, Metrics]:
        key = step_key(state, dropout)
        with jax.profiler.TraceAnnotation("gradient"):
            gradients, sums = gradient(state.trained, frozen, batch, key)
        return finish(state, frozen, gradients, batch, sums)

    return step


@functools.lru_cache(maxsize=16)
def _jit_of_equals(step: EqualFunction) -> WeightedJit:
    return WeightedJit(step.function, donate_argnums=0)


def _reused_jit(step: Callable[..., Any]) -> WeightedJit:
    """Returns a jitted step; an equal step of an earlier run keeps its programs."""
    try:
        return _jit_of_equals(EqualFunction(step))
    except (TypeError, ValueError):  # cannot be compared, or not wholly defined
        return WeightedJit(step, donate_argnums=0)


class CompiledStep:
    """A function that is compiled once per batch shape."""

    def __init__(self, function: Callable[..., Any], shapes: int | None = None):
        """Wraps a function of (state, frozen, batch); the state is donated.

        `shapes` is the number of batch shapes, shown during compilation; None if
        unknown.
        """
        self._jit = _reused_jit(function)
        self._jitted: Any = None
        self._shapes = shapes
        self._compiled: set[Shapes] = set()
        self._ahead: dict[Shapes, Future[None]] = {}

    def __call__(self, state: Any, frozen: Any, batch: Batch) -> Any:
        """Runs the step; compiles it first if the batch has a new shape."""
        shapes = _shapes(batch)
        if shapes not in self._compiled:
            with status(self._describe(batch)):
                ahead = self._ahead.pop(shapes, None)
                if ahead is None or ahead.cancelled():
                    self._compile(state, frozen, batch)
                else:
                    ahead.result()
            self._compiled.add(shapes)
        return self._jitted(state, frozen, batch)

    def compile_ahead(
        self, executor: Executor, state: Any, frozen: Any, batch: Batch
    ) -> None:
        """Compiles for the shape of a batch in another thread, if it is new."""
        shapes = _shapes(batch)
        if shapes not in self._compiled and shapes not in self._ahead:
            self._ahead[shapes] = executor.submit(
                self._compile, state, frozen, abstract(batch)
            )

    def _compile(self, state: Any, frozen: Any, batch: Batch) -> None:
        self.lower(state, frozen, batch).compile()
        return_freed_memory()

    def _describe(self, batch: Batch) -> str:
        number = str(self.programs + 1)
        if self._shapes is not None:
            number += f" of {max(self._shapes, self.programs + 1)}"
        return f"compiling shape {number} ({batch.describe()})"

    @property
    def programs(self) -> int:
        """Number of compiled programs."""
        return len(self._compiled)

    def lower(self, state: Any, frozen: Any, batch: Any) -> jax.stages.Lowered:
        """Returns the lowered program, before it is compiled."""
        self._jitted = self._jit.given(frozen)
        return self._jitted.lower(state, frozen, batch)


def _shapes(batch: Batch) -> Shapes:
    return tuple(leaf.shape for leaf in jax.tree.leaves(batch))
