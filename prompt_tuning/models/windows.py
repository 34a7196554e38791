"""Distances from keys to queries, for attention with windows or chunks."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from prompt_tuning.core.model_config import ModelConfig


def window_distance(
    queries: Int[Array, "#R Q"],
    keys: Int[Array, "#R S"],
    config: ModelConfig,
    bidirectional: bool,
) -> Int[Array, "#R Q S"]:
    """Returns the distance of each key from each query; windows hold smaller ones.

    With chunks, keys of earlier chunks get the window's size, the rest 0. Keys of a
    prompt that all queries see count as later than the queries. `queries` and `keys`
    are positions, and windows reach to both sides if `bidirectional`.
    """
    if config.chunked:
        assert config.window is not None  # as windowed_layers need one
        chunks, of_keys = queries // config.window, keys // config.window
        earlier = of_keys[:, None, :] < chunks[:, :, None]  # [R, Q, S]
        return jnp.where(earlier, config.window, 0)
    distance = queries[:, :, None] - keys[:, None, :]  # [R, Q, S]
    return jnp.abs(distance) if bidirectional else distance
