"""Operators between a whole array and its shards along mesh axes, with their gradients.

They are called by the program of one device, inside `jax.shard_map`. The four are
Megatron's (Shoeybi et al. 2019, section 3) and come in pairs, of which each is the
backward pass of the other: `copy_to` and `reduce_from`, `scatter_columns` and
`gather_columns`. A whole array has the same value on every device of the axes.
"""

import functools
import math

import jax
from jaxtyping import Array, Float

Axes = tuple[str, ...]


def axes_size(axes: Axes) -> int:
    """Returns the number of devices along mesh axes."""
    return math.prod(jax.lax.axis_size(axis) for axis in axes)


def local_slice(x: Array, axes: Axes, dimension: int = 0) -> Array:
    """Returns this device's shard of a whole array, along one dimension."""
    size = x.shape[dimension] // axes_size(axes)
    first = jax.lax.axis_index(axes) * size if axes else 0
    return jax.lax.dynamic_slice_in_dim(x, first, size, axis=dimension)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def copy_to(axes: Axes, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Passes on a whole array; the backward pass sums the devices' gradients."""
    return x


copy_to.defvjp(lambda axes, x: (x, None), lambda axes, _, g: (jax.lax.psum(g, axes),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def reduce_from(axes: Axes, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Sums the devices' arrays; the backward pass passes on the gradient."""
    return jax.lax.psum(x, axes)


reduce_from.defvjp(
    lambda axes, x: (jax.lax.psum(x, axes), None), lambda axes, _, g: (g,)
)


def _gather(axes: Axes, x: Array) -> Array:
    return jax.lax.all_gather(x, axes, axis=x.ndim - 1, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather_columns(axes: Axes, x: Float[Array, "*lead c"]) -> Float[Array, "*lead C"]:
    """Joins the shards of the last axis; each device's gradient is its own slice."""
    return _gather(axes, x)


gather_columns.defvjp(
    lambda axes, x: (_gather(axes, x), None),
    lambda axes, _, g: (local_slice(g, axes, g.ndim - 1),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scatter_columns(axes: Axes, x: Float[Array, "*lead C"]) -> Float[Array, "*lead c"]:
    """Returns this device's shard of the last axis; the gradients are joined."""
    return local_slice(x, axes, x.ndim - 1)


scatter_columns.defvjp(
    lambda axes, x: (local_slice(x, axes, x.ndim - 1), None),
    lambda axes, _, g: (_gather(axes, g),),
)
