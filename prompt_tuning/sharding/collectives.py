"""Collectives that the models call; without a mesh they do nothing.

A step on a mesh is written for one device (`jax.shard_map`): each device has its own
rows of the batch and its own shards of the parameters, and the model states explicitly
what the devices exchange. The two operators around a sharded computation are Megatron's
(Shoeybi et al. 2019, section 3): before it, an identity with a backward pass that
all-reduces the gradient; after it, an all-reduce with an identity as backward pass.

Dimensions are given by their logical names; `AxisRules` maps these to mesh axes. In
shapes, upper case is the size over all devices, and lower case that of a shard.
"""

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from prompt_tuning.core.quantization.tables import Table
from prompt_tuning.settings.axis_rules import MEMORY_KEYS, ROW_AXES, SPLIT_NAMES, TENSOR
from prompt_tuning.sharding.mesh_layout import GROUPS, VOCABULARY, MeshLayout
from prompt_tuning.sharding.shard_operators import (
    Axes,
    axes_size,
    copy_to,
    gather_columns,
    local_slice,
    reduce_from,
)

_layout: contextvars.ContextVar[MeshLayout | None] = contextvars.ContextVar(
    "layout", default=None
)


@contextlib.contextmanager
def use_layout(layout: MeshLayout) -> Iterator[None]:
    """Sets the layout while the program of one device is traced."""
    token = _layout.set(layout)
    try:
        yield
    finally:
        _layout.reset(token)


def current_layout() -> MeshLayout | None:
    """Returns the layout of the program being traced; None without a mesh."""
    return _layout.get()


def _axes(name: str) -> Axes:
    layout = _layout.get()
    return () if layout is None else layout.axes(name)


def _computed_axes(name: str) -> Axes:
    """Returns a dimension's mesh axes if it is computed in shards, else none."""
    return _axes(name) if name in SPLIT_NAMES else ()


def copy_to_shards(x: Float[Array, "..."], name: str) -> Float[Array, "..."]:
    """Passes a replicated array to a computation sharded over a dimension.

    The backward pass all-reduces the gradient, because each device computes only the
    part that belongs to its shard.
    """
    axes = _computed_axes(name)
    return copy_to(axes, x) if axes else x


def reduce_from_shards(x: Float[Array, "..."], name: str) -> Float[Array, "..."]:
    """All-reduces the partial results of a computation sharded over a dimension."""
    axes = _computed_axes(name)
    return reduce_from(axes, x) if axes else x


def _first(axes: Axes, count: int) -> Int[Array, ""] | int:
    """The global index of the first of this device's `count` items."""
    return jax.lax.axis_index(axes) * count if axes else 0


def local_groups(values: Shaped[Array, "*lead G K"]) -> Shaped[Array, "*lead g K"]:
    """Selects the key/value head that this device's query heads attend to.

    This is needed only if there are fewer key/value heads than devices. Then every
    device has all of them and uses one.
    """
    layout = _layout.get()
    if layout is None or not layout.shared_groups:
        return values
    groups, count = values.shape[-2], layout.shard_count(GROUPS)
    # Consecutive devices share a head: device i of `count` uses head i * G // count.
    first = jax.lax.axis_index(layout.axes(GROUPS)) * groups // count
    return jax.lax.dynamic_slice_in_dim(values, first, 1, axis=values.ndim - 2)


def local_prefix_groups(
    values: Shaped[Array, "*lead G K"],
) -> Shaped[Array, "*lead g K"]:
    """Selects this device's key/value heads of a prefix, which is replicated."""
    layout = _layout.get()
    if layout is None or not layout.axes(GROUPS):
        return values
    if layout.shared_groups:
        return local_groups(values)
    return local_slice(values, layout.axes(GROUPS), values.ndim - 2)


def local_memory(x: Shaped[Array, "..."], name: str, axis: int) -> Shaped[Array, "..."]:
    """Selects this device's part of an array along an axis of memory heads."""
    layout = _layout.get()
    shared = name == MEMORY_KEYS and layout is not None and layout.shared_memory_keys
    if layout is None or shared or not layout.axes(name):
        return x
    return local_slice(x, layout.axes(name), axis)


def local_group_count(groups: int) -> int:
    """Returns how many key/value heads this device's query heads attend to."""
    layout = _layout.get()
    return groups if layout is None else max(1, groups // layout.shard_count(GROUPS))


def local_head_count(heads: int) -> int:
    """Returns how many of `heads` query heads this device has."""
    return heads // axes_size(_axes("heads"))


def head_range(heads: int) -> "IndexRange":
    """Returns the range of this device's `heads` query heads among all."""
    axes = _axes("heads")
    return IndexRange(_first(axes, heads), heads * axes_size(axes))


def first_column(columns: int) -> Int[Array, ""] | int:
    """Returns the global index of this device's first feed-forward column."""
    return _first(_axes("mlp"), columns)


def first_of_shard(name: str, count: int) -> Int[Array, ""] | int:
    """Returns the global index of the first of this device's `count` items."""
    return _first(_computed_axes(name), count)


class IndexRange(NamedTuple):
    """A range of consecutive indices.

    Attributes:
      first: the first index.
      total: number of items in all ranges together.
    """

    first: Int[Array, ""] | int
    total: int


def row_range(rows: int) -> IndexRange:
    """The range of this device's `rows` rows in the batch."""
    layout = _layout.get()
    axes = () if layout is None else layout.row_axes
    return IndexRange(_first(axes, rows), rows * axes_size(axes))


def true_everywhere(condition: Bool[Array, ""]) -> Bool[Array, ""]:
    """Whether a condition holds for the rows of every device."""
    layout = _layout.get()
    if layout is None or not layout.row_axes:
        return condition
    return jax.lax.pmin(condition.astype(jnp.int32), layout.row_axes) > 0


class VocabularyShard(NamedTuple):
    """A device's shard of the vocabulary.

    Attributes:
      first: the first token of the shard.
      total: number of tokens of the whole vocabulary, without padding.
      count: number of table rows on this device, with padding.
      axes: mesh axes that the vocabulary is sharded over.
      padded: whether any device's rows are padding.
    """

    first: Int[Array, ""] | int
    total: int
    count: int
    axes: Axes = ()
    padded: bool = False

    @property
    def whole(self) -> bool:
        """Whether the vocabulary is not sharded."""
        return not self.axes

    @property
    def ids(self) -> Int[Array, "v"]:
        """The token of each row of the shard."""
        return self.first + jnp.arange(self.count)

    def sum(self, x: Float[Array, "*lead v"]) -> Float[Array, "*lead"]:
        """Sums over the whole vocabulary."""
        total = jnp.sum(x, axis=-1)  # [*lead]: this shard's part
        return jax.lax.psum(total, self.axes) if self.axes else total

    def max(self, x: Float[Array, "*lead v"]) -> Float[Array, "*lead"]:
        """Takes the maximum over the whole vocabulary."""
        highest = jnp.max(x, axis=-1)  # [*lead]: this shard's part
        return jax.lax.pmax(highest, self.axes) if self.axes else highest


def vocabulary_shard(count: int) -> VocabularyShard:
    """Returns the vocabulary shard of a device with `count` rows of the table."""
    layout = _layout.get()
    if layout is None:
        return VocabularyShard(0, count, count)
    axes, total = layout.axes(VOCABULARY), layout.config.vocabulary_size
    first = _first(axes, count)
    padded = count * layout.shard_count(VOCABULARY) != total
    return VocabularyShard(first, total, count, axes, padded)


def embedding_rows(table: Table, ids: Int[Array, "n"]) -> Float[Array, "n D"]:
    """Reads rows of a sharded embedding table, for ids that all devices share.

    It has no backward pass on a mesh.
    """
    shard = vocabulary_shard(len(table))
    if shard.whole:
        return table[ids]
    position = ids - shard.first  # [n]: row of the shard, out of range on others
    here = (position >= 0) & (position < shard.count)
    rows = table[jnp.clip(position, 0, shard.count - 1)]  # [n, D]
    return jax.lax.psum(jnp.where(here[:, None], rows, 0), shard.axes)


def gather_vocabulary(logits: Float[Array, "*lead v"]) -> Float[Array, "*lead V"]:
    """All-gathers the logits of all tokens from the shards of the vocabulary.

    In the backward pass every device has the same gradient and keeps its own slice.
    """
    shard = vocabulary_shard(logits.shape[-1])
    if shard.whole:
        return logits
    gathered: Array = gather_columns(shard.axes, logits)  # [*lead, V + padding]
    return gathered[..., : shard.total]


def _vocabulary_axes() -> tuple[Axes, Axes]:
    """Returns the vocabulary's mesh axes: those that also split rows, and the rest."""
    axes = _axes(VOCABULARY)
    return (
        tuple(axis for axis in axes if axis in ROW_AXES),
        tuple(axis for axis in axes if axis == TENSOR),
    )


def gather_rows(x: Shaped[Array, "B *rest"]) -> Shaped[Array, "R *rest"]:
    """All-gathers the rows of the devices that share one copy of the vocabulary.

    Each device then computes its shard of the vocabulary for all of these rows, so the
    backward pass sums the devices' gradients and returns each device's own rows.
    """
    rows, tensor = _vocabulary_axes()
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return _all_gather_rows(rows, x)
    return _gather_rows(rows, tensor, x) if rows or tensor else x


def gather_batch(x: Float[Array, "B *rest"]) -> Float[Array, "R *rest"]:
    """All-gathers the rows of all devices; the backward pass sums their gradients."""
    layout = _layout.get()
    rows = () if layout is None else layout.row_axes
    return _gather_rows(rows, (), x) if rows else x


def local_rows(x: Shaped[Array, "R *rest"]) -> Shaped[Array, "B *rest"]:
    """Selects this device's rows of an array that all devices have.

    Inverts `gather_rows`.
    """
    rows, _ = _vocabulary_axes()
    if not rows:
        return x
    differentiable = jnp.issubdtype(x.dtype, jnp.floating)
    return _local_rows(rows, x) if differentiable else local_slice(x, rows)


def reduce_scatter_rows(x: Float[Array, "R *rest"]) -> Float[Array, "B *rest"]:
    """Sums the vocabulary shards' partial results; each device keeps its own rows."""
    rows, tensor = _vocabulary_axes()
    return _reduce_scatter_rows(rows, tensor, x) if rows or tensor else x


def _all_gather_rows(rows: Axes, x: Array) -> Array:
    return jax.lax.all_gather(x, rows, axis=0, tiled=True) if rows else x


def _sum_and_scatter_rows(rows: Axes, tensor: Axes, x: Array) -> Array:
    # Devices along `tensor` have the same rows: they sum. Those along the row axes
    # have different ones: they sum and keep their own.
    x = jax.lax.psum(x, tensor) if tensor else x
    return jax.lax.psum_scatter(x, rows, tiled=True) if rows else x


# `gather_rows` and `reduce_scatter_rows` are each other's backward pass.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather_rows(rows, tensor, x):
    return _all_gather_rows(rows, x)


_gather_rows.defvjp(
    lambda rows, tensor, x: (_all_gather_rows(rows, x), None),
    lambda rows, tensor, _, g: (_sum_and_scatter_rows(rows, tensor, g),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _local_rows(rows, x):
    return local_slice(x, rows)


_local_rows.defvjp(
    lambda rows, x: (local_slice(x, rows), None),
    lambda rows, _, g: (_all_gather_rows(rows, g),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _reduce_scatter_rows(rows, tensor, x):
    return _sum_and_scatter_rows(rows, tensor, x)


_reduce_scatter_rows.defvjp(
    lambda rows, tensor, x: (_sum_and_scatter_rows(rows, tensor, x), None),
    lambda rows, tensor, _, g: (_all_gather_rows(rows, g),),
)
