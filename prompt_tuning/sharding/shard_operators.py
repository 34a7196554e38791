"""Operators between a whole array and its shards along mesh axes, with their gradients.

Call them in the program of one device, inside `jax.shard_map`. The four are Megatron's
(Shoeybi et al. 2019, section 3) and come in pairs that are each other's backward pass:
`copy_to` and `reduce_from`, `scatter_columns` and `gather_columns`. A whole array has
the same value on every device of the axes.

You get the right gradients in all these cases:

- With `check_vma=True`, JAX tracks which arrays are whole, and its own derivatives are
  right inside and outside `jax.shard_map`.
- With `check_vma=False` and `jax.grad` inside, every device gets the gradient of a
  whole array, and Megatron's backward passes are right.
- With `check_vma=False` and `jax.grad` outside, JAX gives each of `n` devices an `n`-th
  of a whole result's gradient, and sums the gradients of a whole argument. JAX's own
  derivatives, which sum over the devices, are right.

JAX keeps the backward pass of a function under `jax.jit` or `jax.checkpoint`. With
`check_vma=False`, differentiate such a function either inside or outside, not both.
"""

import functools
import inspect
import math
import sys

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Axes = tuple[str, ...]

_SHARD_MAP_FILE = inspect.getfile(inspect.unwrap(jax.shard_map))


def axes_size(axes: Axes) -> int:
    """Returns the number of devices along mesh axes."""
    return math.prod(jax.lax.axis_size(axis) for axis in axes)


def local_slice(x: Array, axes: Axes, dimension: int = 0) -> Array:
    """Returns this device's shard of a whole array, along one dimension."""
    size = x.shape[dimension] // axes_size(axes)
    first = jax.lax.axis_index(axes) * size if axes else 0
    return jax.lax.dynamic_slice_in_dim(x, first, size, axis=dimension)


def _tracks_whole_arrays(axes: Axes) -> bool:
    """Tests whether `jax.shard_map` runs with `check_vma=True`.

    JAX then marks the types of values that differ among devices, like their index.
    """
    index = jax.lax.axis_index(axes)
    return jax.typeof(index) != jax.typeof(jnp.zeros((), index.dtype))


def _differentiated_outside() -> bool:
    """Tests whether a backward pass belongs to `jax.grad` outside `jax.shard_map`.

    Such a backward pass is traced by JAX's transposition of `jax.shard_map`. The
    gradient itself does not reveal this, and JAX has no interface that does.
    """
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if "transpose" in code.co_name and code.co_filename == _SHARD_MAP_FILE:
            return True
        frame = frame.f_back
    return False


def copy_to(axes: Axes, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Passes on a whole array; the backward pass sums the devices' gradients."""
    return x if _tracks_whole_arrays(axes) else _copy_to(axes, x)


def reduce_from(axes: Axes, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Sums the devices' arrays; the backward pass passes on the gradient."""
    return jax.lax.psum(x, axes) if _tracks_whole_arrays(axes) else _reduce(axes, x)


def gather_columns(axes: Axes, x: Float[Array, "*lead c"]) -> Float[Array, "*lead C"]:
    """Joins the shards of the last axis; each device's gradient is its own slice."""
    return _gather(axes, x) if _tracks_whole_arrays(axes) else _gather_own(axes, x)


def scatter_columns(axes: Axes, x: Float[Array, "*lead C"]) -> Float[Array, "*lead c"]:
    """Returns this device's shard of the last axis; the gradients are joined."""
    return _scatter(axes, x) if _tracks_whole_arrays(axes) else _scatter_own(axes, x)


def _gather(axes: Axes, x: Array) -> Array:
    last = x.ndim - 1
    return jax.lax.all_gather(x, axes, axis=last, tiled=True, to="invarying")


def _scatter(axes: Axes, x: Array) -> Array:
    return local_slice(x, axes, x.ndim - 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _copy_to(axes: Axes, x: Array) -> Array:
    return x


def _copy_to_backward(axes: Axes, _: None, g: Array) -> tuple[Array]:
    # JAX sums the gradients of a whole argument itself.
    return (g if _differentiated_outside() else jax.lax.psum(g, axes),)


_copy_to.defvjp(lambda axes, x: (x, None), _copy_to_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _reduce(axes: Axes, x: Array) -> Array:
    return jax.lax.psum(x, axes)


def _reduce_backward(axes: Axes, _: None, g: Array) -> tuple[Array]:
    return (jax.lax.psum(g, axes) if _differentiated_outside() else g,)


_reduce.defvjp(lambda axes, x: (jax.lax.psum(x, axes), None), _reduce_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_own(axes: Axes, x: Array) -> Array:
    return _gather(axes, x)


def _gather_backward(axes: Axes, _: None, g: Array) -> tuple[Array]:
    g = jax.lax.psum(g, axes) if _differentiated_outside() else g
    return (_scatter(axes, g),)


_gather_own.defvjp(lambda axes, x: (_gather(axes, x), None), _gather_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scatter_own(axes: Axes, x: Array) -> Array:
    return _scatter(axes, x)


def _scatter_backward(axes: Axes, _: None, g: Array) -> tuple[Array]:
    if not _differentiated_outside():
        return (_gather(axes, g),)
    last, width = g.ndim - 1, g.shape[-1]
    zeros = jnp.zeros((*g.shape[:-1], width * axes_size(axes)), g.dtype)
    first = jax.lax.axis_index(axes) * width
    return (jax.lax.dynamic_update_slice_in_dim(zeros, g, first, last),)


_scatter_own.defvjp(lambda axes, x: (_scatter(axes, x), None), _scatter_backward)
