"""A training step that streams the frozen weights in, layer by layer.

Each micro-batch has its own prefix. On a mesh the prefix always runs separately,
because only the rows are divided among the devices.
"""

import operator
from collections.abc import Container, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Int, Key

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.parameters import Parameters, optional_key
from prompt_tuning.losses.objective import AnySums, LossSums, Objective
from prompt_tuning.losses.token_objective import NATS_PER_WEIGHT
from prompt_tuning.models.language_model import Prefix
from prompt_tuning.models.scoring import loss_sums, merge_model
from prompt_tuning.sharding.array_placement import Placement
from prompt_tuning.streaming.layered_weights import LayeredWeight, LayerReader
from prompt_tuning.streaming.streamed_function import StreamedFunction
from prompt_tuning.streaming.traced_program import Leaves
from prompt_tuning.training.host_optimizer import HostFinish, HostOptimizer
from prompt_tuning.training.step import Finish, Step, compile_finish, join_step


class StreamedGradient:
    """`objective_gradient` with one layer's frozen weights on the device at a time.

    The forward and the backward pass each read the streamed weights once for all
    micro-batches. To allow this, the shared prefix runs again for each micro-batch.
    """

    def __init__(
        self,
        graph: nnx.GraphDef,
        streamed: Mapping[str, LayeredWeight],
        *,
        objective: Objective = NATS_PER_WEIGHT,
        reader: LayerReader | None = None,
        on_host: Mapping[str, bool] | None = None,
        checkpoint_activation: bool = True,
        placement: Placement | None = None,
    ):
        """Describes the computation; nothing is compiled yet.

        `reader` reads layers, None for the default. `on_host` has the trained
        parameters in host memory, and whether each is stacked over layers. With
        `checkpoint_activation` the backward pass recomputes each layer. The other
        arguments are those of `streamed_step`.
        """
        self._graph, self._objective, self._placement = graph, objective, placement
        self._streamed, self._on_host = dict(streamed), on_host or {}
        self._sums = StreamedFunction(
            self._batch_sums, reader, checkpoint_activation=checkpoint_activation
        )

    def __call__(
        self,
        trained: Leaves,
        frozen: Parameters,
        batch: Batch,
        key: Key[Array, ""] | None,
    ) -> tuple[dict[str, Any], LossSums]:
        """Computes the gradient; for NumPy parameters it is a NumPy array."""
        trained = {
            path: LayeredWeight.from_array(path, leaf)
            if self._on_host.get(path)
            else leaf
            for path, leaf in trained.items()
        }
        # As in `gradients`: 1 / divisor at the loss sum, 0 elsewhere.
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
    ) -> AnySums:
        parameters = unpad_others(trained | frozen, self._streamed, self._placement)
        prefix, key = prefix_and_key(
            self._graph, parameters, key, index, self._placement
        )
        return loss_sums(self._graph, parameters, batch, key, self._objective, prefix)


def streamed_step(
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    streamed: Mapping[str, LayeredWeight],
    *,
    dropout: bool,
    objective: Objective = NATS_PER_WEIGHT,
    placement: Placement | None = None,
    host: HostOptimizer | None = None,
    **reading: Any,
) -> Step:
    """Builds a step with streamed frozen weights; nothing is compiled yet.

    `host` updates trained parameters in host memory; `reading` are other keywords of
    `StreamedGradient`.
    """
    common: dict[str, Any] = {"objective": objective, "placement": placement}
    gradient = StreamedGradient(
        graph,
        streamed,
        on_host=None if host is None else host.paths,
        **common,
        **reading,
    )

    def compile_with(on_host: Mapping[str, jax.ShapeDtypeStruct]) -> Finish:
        absent = {path: leaf.abstract for path, leaf in streamed.items()}
        return compile_finish(
            graph=graph, optimizer=optimizer, absent={**absent, **on_host}, **common
        )

    finish = compile_with({}) if host is None else HostFinish(host, compile_with)
    return join_step(gradient, finish, dropout=dropout)


def divide_batch(
    batch: Batch, key: Key[Array, ""] | None, placement: Placement | None
) -> list[tuple[Any, ...]]:
    """Returns (batch `[B, T]`, key, index) for each micro-batch.

    The index is None for a batch without an accumulation axis.
    """
    if batch.tokens.ndim == 2:
        return [(batch, key, None)]
    parts = [
        jax.tree.map(operator.itemgetter(i), batch) for i in range(len(batch.tokens))
    ]
    if placement is not None:
        parts = [placement.put_batch(part) for part in parts]
    return [(part, key, jnp.int32(i)) for i, part in enumerate(parts)]


def unpad_others(
    parameters: Parameters, streamed: Container[str], placement: Placement | None
) -> Parameters:
    """Removes the padding that a mesh adds to parameters; blocks have none.

    `streamed` has the paths of the streamed parameters.
    """
    if placement is None:
        return parameters
    here = {p: x for p, x in parameters.items() if p not in streamed}
    return parameters | placement.unpad(here)


def prefix_and_key(
    graph: nnx.GraphDef,
    parameters: Parameters,
    key: Key[Array, ""] | None,
    index: Int[Array, ""] | None,
    placement: Placement | None,
) -> tuple[Prefix, Key[Array, ""] | None]:
    """Runs the prefix of a micro-batch; returns it and the key of the rows.

    The keys are those of `training.gradients`: one for the prefix, one per micro-batch.
    Without micro-batches, `index` is None; on one device the prefix then runs with the
    rows, and None is returned for it.
    """
    if index is None and placement is None:
        return None, key
    prefix = merge_model(graph, parameters).prefix(optional_key(key, "prefix"))
    if key is None or index is None:
        return prefix, key
    return prefix, jax.random.fold_in(key, index)
