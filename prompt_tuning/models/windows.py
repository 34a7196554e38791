"""Distances that windows and chunks of attention compare with their size."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from prompt_tuning.core.model_config import ModelConfig


def window_distance(
    queries: Int[Array, "#R Q"],
    keys: Int[Array, "#R S"],
    config: ModelConfig,
    bidirectional: bool,
) -> Int[Array, "#R Q S"]:
    """Returns the distance of each key from each query; within a window it is smaller.

    With chunks, it is the window's size for keys of earlier chunks, and else 0: keys
    that a prompt leaves in sight of all queries are as if after them.

    Args:
      queries: positions of the queries.
      keys: positions of the keys.
      config: config of the model.
      bidirectional: whether windows reach to both sides.
    """
    if config.chunked:
        assert config.window is not None  # as windowed_layers need one
        chunks, of_keys = queries // config.window, keys // config.window
        earlier = of_keys[:, None, :] < chunks[:, :, None]  # [R, Q, S]
        return jnp.where(earlier, config.window, 0)
    distance = queries[:, :, None] - keys[:, None, :]  # [R, Q, S]
    return jnp.abs(distance) if bidirectional else distance
