"""A training step that streams the frozen weights in, layer by layer."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Int, Key

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.parameters import Parameters, merge
from prompt_tuning.losses.objective import LossSums, Objective
from prompt_tuning.losses.token_objective import NATS_PER_WEIGHT
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.models.scoring import loss_sums
from prompt_tuning.sharding.array_placement import Placement
from prompt_tuning.streaming.layered_weights import LayeredWeight, LayerReader
from prompt_tuning.streaming.streamed_function import StreamedFunction
from prompt_tuning.streaming.traced_program import Leaves
from prompt_tuning.training.host_optimizer import (
    HostOptimizer,
    named_leaves,
    select_leaves,
    squared_norm,
)
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step import Metrics, batch_metrics, step_key, update
from prompt_tuning.training.streamed_batches import (
    divide_batch,
    prefix_and_key,
    unpad_others,
)


class StreamedStep:
    """`train_step` with one layer's frozen weights on the device at a time.

    The forward and the backward pass each read the streamed weights once, for all
    micro-batches. To allow this, the model's prefix, which micro-batches share, runs
    again for each of them.
    """

    def __init__(
        self,
        graph: nnx.GraphDef,
        optimizer: optax.GradientTransformation,
        streamed: Mapping[str, LayeredWeight],
        *,
        dropout: bool,
        objective: Objective = NATS_PER_WEIGHT,
        reader: LayerReader | None = None,
        host: HostOptimizer | None = None,
        checkpoint_activation: bool = True,
        placement: Placement | None = None,
    ):
        """Sets up the step; nothing is compiled yet.

        Args:
          graph: the model's structure.
          optimizer: optimizer of the trained parameters that are on the device.
          streamed: frozen parameters that are not in memory, by path.
          dropout: whether dropout is active.
          objective: the training objective.
          reader: reads layers; None for the default.
          checkpoint_activation: whether the backward pass recomputes each layer.
          host: updates the trained parameters in host memory; None if there are none.
          placement: the parameters' shardings on a mesh; None on one device.
        """
        self._host, self._placement = host, placement
        self._graph, self._objective, self._dropout = graph, objective, dropout
        self._streamed = dict(streamed)
        self._sums = StreamedFunction(
            self._batch_sums, reader, checkpoint_activation=checkpoint_activation
        )
        finish = functools.partial(self._finish, optimizer=optimizer)
        self._finished = jax.jit(finish, donate_argnums=0, static_argnums=5)

    def __call__(
        self, state: TrainState, frozen: Parameters, batch: Batch
    ) -> tuple[TrainState, Metrics]:
        """Computes one step; donates `state`.

        Args:
          state: the state before the step.
          frozen: frozen parameters that are in memory.
          batch: one batch, or micro-batches on a leading axis.

        Returns:
          the next state, and the metrics of `train_step`.
        """
        key = step_key(state, self._dropout)
        with jax.profiler.TraceAnnotation("gradient"):
            gradient, sums = self.gradient(state.trained, frozen, batch, key)
        if self._host is None:
            return self._finished(state, frozen, gradient, batch, sums)
        return self._finish_on_host(self._host, state, frozen, gradient, batch, sums)

    def _finish_on_host(
        self,
        host: HostOptimizer,
        state: TrainState,
        frozen: Parameters,
        gradient: Mapping[str, Any],
        batch: Batch,
        sums: LossSums,
    ) -> tuple[TrainState, Metrics]:
        """Updates the parameters on the device, then those in host memory."""
        there, here = _divided(state.trained, host)
        there_gradient, here_gradient = _divided(gradient, host)
        # The device's step donates its state; leaves that both share are copied first.
        old = jax.tree.map(
            lambda leaf: leaf if isinstance(leaf, np.ndarray) else np.array(leaf),
            state.optimizer_state,
        )
        device = dataclasses.replace(
            state,
            trained=there,
            optimizer_state=jax.device_put(host.device_state(state.trained, old)),
        )
        shapes = tuple((path, leaf.shape) for path, leaf in here.items())
        device, metrics = self._finished(
            device, frozen, there_gradient, batch, sums, shapes
        )
        with jax.profiler.TraceAnnotation("update in host memory"):
            shared = host.update(here, here_gradient, old)
        leaves = named_leaves(old) | shared
        leaves |= named_leaves(device.optimizer_state)
        squares = metrics["gradient_norm"] ** 2 + squared_norm(here_gradient)
        every = {path: {**device.trained, **here}[path] for path in state.trained}
        optimizer_state = select_leaves(old, leaves)
        state = dataclasses.replace(
            device, trained=every, optimizer_state=optimizer_state
        )
        return state, metrics | {"gradient_norm": jnp.sqrt(squares)}

    def gradient(
        self,
        trained: Leaves,
        frozen: Parameters,
        batch: Batch,
        key: Key[Array, ""] | None,
    ) -> tuple[dict[str, Any], LossSums]:
        """Computes the gradient of the batch's loss, without the prompt's penalty.

        Arguments and results are the same as in `training.step.gradients`; the
        gradients of NumPy arrays are NumPy arrays.
        """
        if self._host is not None:
            trained = {
                path: LayeredWeight.from_array(path, leaf)
                if self._host.paths.get(path)
                else leaf
                for path, leaf in trained.items()
            }
        # As there: the gradient at the loss sum is 1 / divisor, at the others zero.
        share = jnp.asarray(1 / self._objective.divisor(batch), jnp.float32)
        sum_gradients = LossSums(share, jnp.zeros_like(share), jnp.zeros_like(share))
        micro_batches = divide_batch(batch, key, self._placement)
        gradient, sums = self._sums.value_and_gradient(
            trained,
            frozen | self._streamed,
            micro_batches,
            [sum_gradients] * len(micro_batches),
        )
        return gradient, jax.tree.map(lambda *parts: sum(parts), *sums)

    def _batch_sums(
        self,
        trained: Parameters,
        frozen: Parameters,
        batch: Batch,
        key: Key[Array, ""] | None,
        index: Int[Array, ""] | None,
    ) -> LossSums:
        """The objective's sums over a batch, or over the micro-batch with an index."""
        parameters = unpad_others(trained | frozen, self._streamed, self._placement)
        prefix, key = prefix_and_key(
            self._graph, parameters, key, index, self._placement
        )
        return loss_sums(self._graph, parameters, batch, key, self._objective, prefix)

    def _finish(
        self,
        state: TrainState,
        frozen: Parameters,
        gradient: Parameters,
        batch: Batch,
        sums: LossSums,
        absent: tuple[tuple[str, tuple[int, ...]], ...] = (),
        *,
        optimizer: optax.GradientTransformation,
    ) -> tuple[TrainState, Metrics]:
        """Adds the penalty's gradient, computes metrics and updates; runs no block."""
        # Streamed weights, and trained ones in host memory, are needed for the model's
        # structure only, as shapes.
        shapes = {p: jax.ShapeDtypeStruct(shape, jnp.float32) for p, shape in absent}
        frozen = frozen | cast(Parameters, self._abstract | shapes)

        def penalty(trained: Parameters) -> Array:
            return self._model(trained | frozen).penalty()

        if self._model(state.trained | frozen).has_penalty:
            penalty_gradient = jax.grad(penalty)(state.trained)
            gradient = jax.tree.map(jnp.add, gradient, penalty_gradient)
        parameters = state.trained | frozen
        metrics = batch_metrics(self._graph, parameters, batch, sums, self._objective)
        return update(state, gradient, metrics, optimizer, self._placement)

    @property
    def _abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the parameters that are not on the device."""
        return {path: leaf.abstract for path, leaf in self._streamed.items()}

    def _model(self, parameters: Parameters) -> LanguageModel:
        return cast(LanguageModel, merge(self._graph, parameters))


def _divided(
    leaves: Mapping[str, Any], host: HostOptimizer
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divides trained leaves into those on the device and those in host memory."""
    there = {path: leaf for path, leaf in leaves.items() if path not in host.paths}
    here = {path: leaf for path, leaf in leaves.items() if path in host.paths}
    return there, here
