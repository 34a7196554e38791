"""Keys and values that blocks read, computed before them or by other blocks."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from prompt_tuning.core.layer_kinds import KEYS, SHARING, shared_layers
from prompt_tuning.core.mixed_scan import entries
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import ParameterAxes
from prompt_tuning.models.attention import KeyValues
from prompt_tuning.models.streams import Context, StreamView
from prompt_tuning.sharding import collectives, parameter_gathering

Shared = dict[str, tuple[KeyValues, ...]]
"""Keys and values by the kinds of `layer_kinds.SHARING` that read them."""


def shared_keys(
    config: ModelConfig, views: Sequence[StreamView], past: Sequence[Context]
) -> tuple[Shared, Shared]:
    """Returns the keys and values that layers read of other layers.

    Returns:
      those of the streams, zeros at first, and those that precede the streams.
    """
    if not config.sharing_layers:
        return {}, {}
    known, layers = stacked_key_values(past), shared_layers(config)
    own = dict.fromkeys(layers, empty_keys(config, views))
    return own, {name: entries(known, layer) for name, layer in layers.items()}


def empty_keys(
    config: ModelConfig, views: Sequence[StreamView], *layers: int
) -> tuple[KeyValues, ...]:
    """Returns keys and values of zeros for each stream, `[*layers, G, R, Q, K]`."""
    groups = collectives.local_group_count(config.key_value_heads)
    shapes = [(*layers, groups, *view.shape, config.head_width) for view in views]
    zeros = [jnp.zeros(shape, config.dtype) for shape in shapes]
    return tuple(KeyValues(x, x) for x in zeros)


def keys_of_others(
    kind: Sequence[str], shared: Shared, before: Shared, past: Mapping[str, Any]
) -> tuple[tuple[KeyValues, ...] | None, Mapping[str, Any]]:
    """Returns the streams' keys and what precedes them, for a block of a kind.

    The first is None if the block computes its own, and then `past` precedes them.
    """
    for part in before.keys() & {*kind}:
        return shared[part], {KEYS: before[part]}
    return None, past


def with_own(shared: Shared, kind: Sequence[str], kept: Mapping[str, Any]) -> Shared:
    """Returns them after a block that may leave those that later ones read."""
    readers = {SHARING.get(part) for part in kind}.intersection(shared)
    return shared | {name: kept[KEYS] for name in readers if name}


def encoder_outputs(
    contexts: Sequence[Context],
) -> list[Float[Array, "B S D"] | None]:
    """Returns encoder outputs; each block computes its keys and values itself."""
    return [
        None
        if isinstance(source, KeyValues)
        else collectives.copy_to_shards(source, "heads")
        for source in (context.key_values for context in contexts)
    ]


def stacked_key_values(contexts: Sequence[Context]) -> tuple[KeyValues | None, ...]:
    """Returns keys and values of all blocks; None where blocks compute their own."""
    sources = [context.key_values for context in contexts]
    return tuple(x if isinstance(x, KeyValues) else None for x in sources)


def gathers_weights(axes: Mapping[str, ParameterAxes]) -> bool:
    """Returns whether some parameter is sharded and gathered where it is used."""
    return any(
        parameter_gathering.needs_gather(known.names, path)
        for path, known in axes.items()
    )
