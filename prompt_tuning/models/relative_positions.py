"""T5's relative position bias (Raffel et al. 2020, 2.1)."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int, Key

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import declare, fan_in


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
