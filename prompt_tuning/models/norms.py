"""Norms of hidden states and of heads, computed in float32."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import declare
from prompt_tuning.models.layers import adapted_output, applied_bias, recompute
from prompt_tuning.sharding import collectives


class Norm(nnx.Module):
    """Root-mean-square norm or layer norm, as configured, in float32.

    "rms_plus_one" stores the scale minus one, initially 0 (Gemma Team 2024, "Gemma";
    the sum is computed in float32, since bfloat16 would round it).

    Attributes:
      scale: `[L, D]`, or `[D]` for a single norm; None in "layer_fixed".
      bias: bias of a layer norm, of the same shape; None for a root-mean-square norm.
      adapters: a trained bias, or empty; see `TrainedBias`.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        config: ModelConfig,
        *,
        stacked: int | None,
        width: int | None = None,
        axis: str = "embed",
        head_width: int | None = None,
        partial_over: str | None = None,
    ):
        self.epsilon = config.norm_epsilon
        self.plus_one = config.norm == "rms_plus_one"
        self.centered = config.norm.startswith("layer")
        self.head_width = head_width
        self.axis, self.width = axis, config.width if width is None else width
        shape = (self.width,) if stacked is None else (stacked, self.width)
        axes = (axis,) if stacked is None else ("layers", axis)
        ones, zeros = jax.nn.initializers.ones, jax.nn.initializers.zeros
        start = zeros if self.plus_one else ones
        array = functools.partial(
            declare,
            key,
            shape,
            axes,
            dtype=config.parameter_dtype,
            partial_over=partial_over,
        )
        fixed = config.norm == "layer_fixed"
        self.scale = None if fixed else array(initializer=start)
        self.bias = array(initializer=zeros) if config.norm == "layer" else None
        self.adapters = nnx.Dict()

    def __call__(self, x: Float[Array, "*lead D"]) -> Float[Array, "*lead D"]:
        """Normalizes the last axis; in a norm of heads that is `K`."""
        ones = jnp.ones(x.shape[-1], x.dtype)
        scale = ones if self.scale is None else self.scale[...]
        if self.head_width is not None and len(scale) > self.head_width:
            scale = scale.reshape(-1, self.head_width)  # of each head on this device
        if self.plus_one:
            scale = 1 + scale.astype(jnp.float32)
        if self.centered:
            bias = applied_bias(self.bias, self.adapters)
            bias = jnp.zeros_like(scale) if bias is None else bias
            y = layer_norm(x, scale, bias, self.epsilon)
            return adapted_output(x, y, self.adapters)
        if self.head_width is None and len(scale) < self.width:  # a shard of the heads
            return sharded_mean_square_norm(
                x, scale, self.epsilon, self.axis, self.width
            )
        return root_mean_square_norm(x, scale, self.epsilon)


def normalize(norm: Norm | None, x: Float[Array, "*lead D"]) -> Float[Array, "*lead D"]:
    """Applies a norm; None leaves `x` as it is."""
    return x if norm is None else norm(x)


@functools.partial(recompute, static_argnums=2)
def root_mean_square_norm(
    x: Float[Array, "*lead D"], scale: Float[Array, "*heads D"], epsilon: float
) -> Float[Array, "*lead D"]:
    """Computes `x / rms(x) * scale` in float32 (Zhang and Sennrich 2019, eq. 4)."""
    wide = x.astype(jnp.float32)
    square = jnp.mean(wide * wide, -1, keepdims=True)  # [*lead, 1]
    normed = wide * jax.lax.rsqrt(square + epsilon)
    return (normed * scale.astype(jnp.float32)).astype(x.dtype)


def sharded_mean_square_norm(
    x: Float[Array, "*lead d"],
    scale: Float[Array, "d"],
    epsilon: float,
    axis: str,
    width: int,
) -> Float[Array, "*lead d"]:
    """Computes the root-mean-square norm over an axis that a mesh shards.

    `x` and `scale` are this device's shards of `width` elements on the logical `axis`.
    """
    wide = x.astype(jnp.float32)
    total = collectives.reduce_from_shards(
        jnp.sum(wide * wide, -1, keepdims=True), axis
    )
    # Every device uses the sum for its own shard.
    square = collectives.copy_to_shards(total, axis) / width
    normed = wide * jax.lax.rsqrt(square + epsilon)
    return (normed * scale.astype(jnp.float32)).astype(x.dtype)


@functools.partial(recompute, static_argnums=3)
def layer_norm(
    x: Float[Array, "*lead D"],
    scale: Float[Array, "*heads D"],
    bias: Float[Array, "*heads D"],
    epsilon: float,
) -> Float[Array, "*lead D"]:
    """Computes `(x - mean(x)) / std(x) * scale + bias` in float32 (Ba et al. 2016)."""
    wide = x.astype(jnp.float32)
    centered = wide - wide.mean(-1, keepdims=True)
    square = jnp.mean(centered * centered, -1, keepdims=True)  # [*lead, 1]
    normed = centered * jax.lax.rsqrt(square + epsilon) * scale.astype(jnp.float32)
    return (normed + bias.astype(jnp.float32)).astype(x.dtype)
