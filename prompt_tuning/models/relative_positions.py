"""Distances between positions in attention: T5's bias, ALiBi, and windows."""

import math

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import declare, fan_in
from prompt_tuning.sharding import collectives


class RelativePositionBias(nnx.Module):
    """T5's relative position bias, shared by a whole stack (Raffel et al. 2020, 2.1).

    In UMT5 each block has its own (Chung et al. 2023, "UniMax", section 4).

    Attributes:
      embedding: bias of each head and bucket, `[H, buckets]`, or `[L, H, buckets]`.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        config: ModelConfig,
        *,
        layers: int,
        bidirectional: bool,
    ):
        self.bidirectional = bidirectional
        self.buckets = config.relative_buckets
        self.maximum = config.relative_maximum_distance
        shape = (config.heads, config.relative_buckets)
        axes = ("heads", "relative_buckets")
        self.in_each_block = config.relative_bias_in_each_block
        self.embedding = declare(
            key,
            (layers, *shape) if self.in_each_block else shape,
            ("layers", *axes) if self.in_each_block else axes,
            fan_in(config.width),
            config.parameter_dtype,
        )

    def bucket(
        self, queries: Int[Array, "#R Q"], keys: Int[Array, "#R S"]
    ) -> Int[Array, "#R Q S"]:
        """Returns the bucket of every query and key of its row."""
        return relative_position_bucket(
            keys[:, None, :] - queries[:, :, None],
            bidirectional=self.bidirectional,
            buckets=self.buckets,
            maximum=self.maximum,
        )


def relative_position_bucket(
    relative: Int[Array, "*lead"], *, bidirectional: bool, buckets: int, maximum: int
) -> Int[Array, "*lead"]:
    """Maps key position minus query position to T5's buckets (Raffel et al. 2020, 2.1).

    Half of the buckets hold one distance each, the rest grow logarithmically up to
    `maximum`. A bidirectional stack spends half of all buckets on each sign.
    """
    offset = jnp.zeros_like(relative)
    if bidirectional:
        buckets //= 2
        offset = jnp.where(relative > 0, buckets, 0)
        distance = jnp.abs(relative)
    else:
        distance = jnp.maximum(-relative, 0)
    exact = buckets // 2  # distances below it have a bucket each
    # 0 at distance `exact`, 1 at distance `maximum`, logarithmic between them.
    ratio = jnp.log(jnp.maximum(distance, 1) / exact) / np.log(maximum / exact)
    far = exact + (ratio * (buckets - exact)).astype(jnp.int32)
    far = jnp.minimum(far, buckets - 1)
    return offset + jnp.where(distance < exact, distance, far)


def slopes(heads: int) -> Float[np.ndarray, "H"]:
    """Returns the slope of each head in ALiBi (Press et al. 2022, section 3).

    For a power of two they are `2 ** (-8 n / heads)`, `n` from 1. Otherwise the slopes
    of the next lower power of two come first, then every second slope of the next
    higher one.
    """
    power = 2 ** math.floor(math.log2(heads))
    first = 2.0 ** (-8 / power * np.arange(1, power + 1))
    between = 2.0 ** (-4 / power * np.arange(1, 2 * (heads - power), 2))
    return np.concatenate([first, between])


def linear_bias(
    queries: Int[Array, "#R Q"], keys: Int[Array, "#R S"], heads: int
) -> Float[Array, "#R h Q S"]:
    """Computes ALiBi's bias of every score, for this device's heads.

    `queries` and `keys` are positions; `heads` counts the heads `H` of all devices.
    """
    count = collectives.local_head_count(heads)
    first, _ = collectives.head_range(count)
    local = jnp.asarray(slopes(heads), jnp.float32)[first + jnp.arange(count)]
    distance = queries[:, None, :, None] - keys[:, None, None, :]  # [R, 1, Q, S]
    return -local[:, None, None] * distance


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
