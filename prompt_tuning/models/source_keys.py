"""Keys and values that a block does not compute itself: earlier or shared ones."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from prompt_tuning.core.block_scan import entries
from prompt_tuning.core.layer_kinds import KEYS, SHARING, shared_layers
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import ParameterAxes, logical_axes, merge, split
from prompt_tuning.core.recomputation import ALL_BUT_WEIGHTS, rematerialized
from prompt_tuning.models.attention import KeyValues
from prompt_tuning.models.attention_layer import Attention
from prompt_tuning.models.host_memory import any_on_host, move_to_device
from prompt_tuning.models.streams import Context, StreamView
from prompt_tuning.sharding import collectives, shard_map

Shared = dict[str, tuple[KeyValues, ...]]
"""Keys and values by the kinds of `layer_kinds.SHARING` that read them."""


def shared_keys(
    config: ModelConfig, views: Sequence[StreamView], past: Sequence[Context]
) -> tuple[Shared, Shared]:
    """Prepares the keys and values that some layers take from other layers.

    Returns:
      the streams' keys and values, initially zeros, and those before the streams.
    """
    if not config.sharing_layers:
        return {}, {}
    known, layers = stacked_key_values(past), shared_layers(config)
    zeros = dict.fromkeys(layers, empty_keys(config, views))
    return zeros, {name: entries(known, layer) for name, layer in layers.items()}


def empty_keys(
    config: ModelConfig, views: Sequence[StreamView], *layers: int
) -> tuple[KeyValues, ...]:
    """Returns keys and values of zeros for each stream, `[*layers, G, R, Q, K]`."""
    groups = collectives.local_group_count(config.key_value_heads)
    shapes = [(*layers, groups, *view.shape, config.head_width) for view in views]
    zeros = [jnp.zeros(shape, config.dtype) for shape in shapes]
    return tuple(KeyValues(x, x) for x in zeros)


def reused_keys(
    kind: Sequence[str], shared: Shared, before: Shared, past: Mapping[str, Any]
) -> tuple[tuple[KeyValues, ...] | None, Mapping[str, Any]]:
    """Returns the streams' keys and what precedes them, for a block of a kind.

    The first is None if the block computes its own keys; then `past` precedes them.
    """
    for part in before.keys() & {*kind}:
        return shared[part], {KEYS: before[part]}
    return None, past


def with_shared_keys(
    shared: Shared, kind: Sequence[str], kept: Mapping[str, Any]
) -> Shared:
    """Updates the shared keys after a block that later ones may read from."""
    readers = {SHARING.get(part) for part in kind}.intersection(shared)
    return shared | {name: kept[KEYS] for name in readers if name}


def encoder_outputs(
    contexts: Sequence[Context],
) -> list[Float[Array, "B S D"] | None]:
    """Returns the encoder outputs that each block projects itself, None elsewhere."""
    return [
        None
        if isinstance(source, KeyValues)
        else collectives.copy_to_shards(source, "heads")
        for source in (context.key_values for context in contexts)
    ]


def stacked_key_values(contexts: Sequence[Context]) -> tuple[KeyValues | None, ...]:
    """Returns keys and values of all blocks, None where blocks compute their own."""
    sources = [context.key_values for context in contexts]
    return tuple(x if isinstance(x, KeyValues) else None for x in sources)


def gathers_weights(axes: Mapping[str, ParameterAxes]) -> bool:
    """Tests whether any parameter is sharded and gathered where it is used."""
    return any(
        shard_map.needs_gather(known.names, path) for path, known in axes.items()
    )


def in_each_block(
    attention: Attention, function: Callable[..., KeyValues], inputs: Any
) -> KeyValues:
    """Computes keys and values with one attention layer of every block.

    Args:
      attention: those layers, stacked on `L`.
      function: `f(layer of one block, its inputs)`.
      inputs: tree, stacked on `L`.
    """
    graph, parameters = split(attention)
    axes = logical_axes(attention)

    def run(layer):
        parameters, inputs = layer
        whole = shard_map.gather_parameters(move_to_device(parameters), axes)
        return function(merge(graph, whole), inputs)

    if gathers_weights(axes) or any_on_host(parameters):
        run = rematerialized(run, ALL_BUT_WEIGHTS, in_scan=True)
    # One block at a time: a batched product would cast all kernels at once.
    return jax.lax.map(run, (parameters, inputs))
