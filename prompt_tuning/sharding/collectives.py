"""What the models call where a mesh may split them; without a mesh, nothing is done.

A step on a mesh is written for one device (`jax.shard_map`): each sees its own rows of
the batch and its own part of the parameters, and says itself what is exchanged. The
two operators around what is split are Megatron's (Shoeybi et al. 2019, section 3): on
the way in an identity whose backward pass adds up the devices' gradients, on the way
out a sum whose backward pass is the identity.

Dimensions are spoken of by their names in `AxisRules`; the rules say which mesh axes
these are.
"""

import contextlib
import contextvars
import functools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from prompt_tuning.core.parameters import ParameterAxes
from prompt_tuning.sharding.axis_rules import ROW_AXES, SPLIT_NAMES, TENSOR, axes_of
from prompt_tuning.sharding.mesh_layout import (
    GROUPS,
    NEVER_GATHERED,
    VOCABULARY,
    MeshLayout,
)

_layout: contextvars.ContextVar[MeshLayout | None] = contextvars.ContextVar(
    "layout", default=None
)

Axes = tuple[str, ...]


@contextlib.contextmanager
def use_layout(layout: MeshLayout) -> Iterator[None]:
    """While one device's part of a program is traced."""
    token = _layout.set(layout)
    try:
        yield
    finally:
        _layout.reset(token)


def _axes(name: str) -> Axes:
    layout = _layout.get()
    return () if layout is None else layout.axes(name)


def _computed_axes(name: str) -> Axes:
    """Of a dimension that each device computes its part of; others have none."""
    return _axes(name) if name in SPLIT_NAMES else ()


def _size(axes: Axes) -> int:
    return math.prod(jax.lax.axis_size(axis) for axis in axes)


def copy_to_shards(x: Float[Array, "..."], name: str) -> Float[Array, "..."]:
    """What is whole on every device, as each uses it for its part of a dimension."""
    axes = _computed_axes(name)
    return _entered(axes, x) if axes else x


def reduce_from_shards(x: Float[Array, "..."], name: str) -> Float[Array, "..."]:
    """The sum of what the devices made, each of its part of a dimension."""
    axes = _computed_axes(name)
    return _reduced(axes, x) if axes else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _entered(axes, x):
    return x


_entered.defvjp(lambda axes, x: (x, None), lambda axes, _, g: (jax.lax.psum(g, axes),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _reduced(axes, x):
    return jax.lax.psum(x, axes)


_reduced.defvjp(lambda axes, x: (jax.lax.psum(x, axes), None), lambda axes, _, g: (g,))


def _own_part(x: Array, axes: Axes, place: int = 0) -> Array:
    """Of an array that every device has whole, this one's share of a dimension."""
    size = x.shape[place] // _size(axes)
    return jax.lax.dynamic_slice_in_dim(x, _first(axes, size), size, axis=place)


def _first(axes: Axes, count: int) -> Int[Array, ""] | int:
    """The number of the first of this device's `count` of something."""
    return jax.lax.axis_index(axes) * count if axes else 0


def local_groups(made: Shaped[Array, "*lead G K"]) -> Shaped[Array, "*lead g K"]:
    """Of all key/value heads the one that this device's heads look at.

    Where there are fewer of them than devices, each device has all and needs one.
    """
    layout = _layout.get()
    if layout is None or not layout.shared_groups:
        return made
    groups, count = made.shape[-2], layout.shard_count(GROUPS)
    first = jax.lax.axis_index(layout.axes(GROUPS)) * groups // count
    return jax.lax.dynamic_slice_in_dim(made, first, 1, axis=made.ndim - 2)


def local_prefix_groups(made: Shaped[Array, "*lead G K"]) -> Shaped[Array, "*lead g K"]:
    """Of the key/value heads of a prefix, which is whole, those of this device."""
    layout = _layout.get()
    if layout is None or not layout.axes(GROUPS):
        return made
    if layout.shared_groups:
        return local_groups(made)
    return _own_part(made, layout.axes(GROUPS), made.ndim - 2)


def local_group_count(groups: int) -> int:
    """How many of all key/value heads this device's heads look at."""
    layout = _layout.get()
    return groups if layout is None else max(1, groups // layout.shard_count(GROUPS))


def head_range(heads: int) -> "IndexRange":
    """Where this device's heads stand among all."""
    axes = _axes("heads")
    return IndexRange(_first(axes, heads), heads * _size(axes))


def first_column(columns: int) -> Int[Array, ""] | int:
    """The number of the first of this device's feed-forward columns."""
    return _first(_axes("mlp"), columns)


class IndexRange(NamedTuple):
    """Some of many: the number of the first, and how many there are in all."""

    first: Int[Array, ""] | int
    total: int


def row_range(rows: int) -> IndexRange:
    """Where a device's rows stand in the batch."""
    layout = _layout.get()
    axes = () if layout is None else layout.row_axes
    return IndexRange(_first(axes, rows), rows * _size(axes))


def true_everywhere(condition: Bool[Array, ""]) -> Bool[Array, ""]:
    """Whether something holds for the rows of every device."""
    layout = _layout.get()
    if layout is None or not layout.row_axes:
        return condition
    return jax.lax.pmin(condition.astype(jnp.int32), layout.row_axes) > 0


def gather_parameters(
    parameters: Mapping[str, Array], axes: Mapping[str, ParameterAxes]
) -> dict[str, Array]:
    """Parameters as they are computed with: whole but for what a device does alone.

    Args:
      parameters: some of a model's, by path, perhaps of one block.
      axes: of each; a leading "layers" is skipped where the array has no such axis.
    """
    layout = _layout.get()
    if layout is None:
        return dict(parameters)
    return {
        path: _gathered(layout, path, array, axes[path])
        for path, array in parameters.items()
    }


def _gathered(
    layout: MeshLayout, path: str, array: Array, known: ParameterAxes
) -> Array:
    skipped = len(known.names) - array.ndim
    # Of key/value heads that devices share, and of what adapts columns that they
    # divide, each has the gradient of its own.
    differs = (*ROW_AXES, *layout.partial_axes(known))
    for place, axes in _brought(layout, path, known.names):
        # Of several axes the last stands innermost.
        for axis in reversed(axes):
            array = _whole(axis, place - skipped, axis in differs, array)
    return array


def _brought(
    layout: MeshLayout, path: str, names: tuple[str, ...]
) -> Iterator[tuple[int, Axes]]:
    """Of each dimension that is put together its place and its mesh axes."""
    spec = layout.spec(path, names)
    for place, (name, entry) in enumerate(zip(names, spec, strict=True)):
        if name not in NEVER_GATHERED:
            yield place, layout.used_axes(axes_of(entry))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _whole(axis, place, differs, part):
    del differs
    return jax.lax.all_gather(part, axis, axis=place, tiled=True)


def _whole_backward(axis, place, differs, _, g):
    if differs:
        return (jax.lax.psum_scatter(g, axis, scatter_dimension=place, tiled=True),)
    # Every device has the same gradient already.
    return (_own_part(g, (axis,), place),)


_whole.defvjp(
    lambda axis, place, differs, part: (_whole(axis, place, differs, part), None),
    _whole_backward,
)


def needs_gather(names: tuple[str, ...], path: str) -> bool:
    """Whether a parameter is put together where it is used."""
    layout = _layout.get()
    if layout is None:
        return False
    return any(axes for _, axes in _brought(layout, path, names))


class VocabularyShard(NamedTuple):
    """A device's part of the vocabulary.

    Attributes:
      first: the first token of it.
      total: tokens of the whole vocabulary, padding not counted.
      count: places that this device has, padding counted.
      axes: the mesh axes that the vocabulary is divided over.
      padded: whether some device's places are padding.
    """

    first: Int[Array, ""] | int
    total: int
    count: int
    axes: Axes = ()
    padded: bool = False

    @property
    def whole(self) -> bool:
        """Whether every device has all of it."""
        return not self.axes

    @property
    def ids(self) -> Int[Array, "v"]:
        """The token of each place."""
        return self.first + jnp.arange(self.count)

    def sum(self, x: Float[Array, "*lead v"]) -> Float[Array, "*lead"]:
        """A sum over the whole vocabulary."""
        total = jnp.sum(x, axis=-1)
        return jax.lax.psum(total, self.axes) if self.axes else total

    def max(self, x: Float[Array, "*lead v"]) -> Float[Array, "*lead"]:
        """The highest number of the whole vocabulary."""
        highest = jnp.max(x, axis=-1)
        return jax.lax.pmax(highest, self.axes) if self.axes else highest


def vocabulary_shard(count: int) -> VocabularyShard:
    """The part of the vocabulary whose `count` rows of the table a device has."""
    layout = _layout.get()
    if layout is None:
        return VocabularyShard(0, count, count)
    axes, total = layout.axes(VOCABULARY), layout.config.vocabulary_size
    first = _first(axes, count)
    padded = count * layout.shard_count(VOCABULARY) != total
    return VocabularyShard(first, total, count, axes, padded)


def embedding_rows(
    table: Float[Array, "v D"], ids: Int[Array, "n"]
) -> Float[Array, "n D"]:
    """Rows of the vocabulary's table, of ids that are the same on every device.

    It has no backward pass over a mesh.
    """
    own = vocabulary_shard(len(table))
    if own.whole:
        return table[ids]
    place = ids - own.first
    here = (place >= 0) & (place < own.count)
    found = jnp.take(table, place, axis=0, mode="clip")
    return jax.lax.psum(jnp.where(here[:, None], found, 0), own.axes)


def gather_vocabulary(logits: Float[Array, "*lead v"]) -> Float[Array, "*lead V"]:
    """The scores of all tokens, from those that each device made of its part.

    In the backward pass every device has the same gradient of all of them.
    """
    own = vocabulary_shard(logits.shape[-1])
    if own.whole:
        return logits
    every: Array = _joined_columns(own.axes, logits)
    return every[..., : own.total]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _joined_columns(axes, x):
    return jax.lax.all_gather(x, axes, axis=x.ndim - 1, tiled=True)


_joined_columns.defvjp(
    lambda axes, x: (_joined_columns(axes, x), None),
    lambda axes, _, g: (_own_part(g, axes, g.ndim - 1),),
)


def _vocabulary_axes() -> tuple[Axes, Axes]:
    """Of the vocabulary's mesh axes those of rows, and the others."""
    axes = _axes(VOCABULARY)
    return (
        tuple(axis for axis in axes if axis in ROW_AXES),
        tuple(axis for axis in axes if axis == TENSOR),
    )


def gather_rows(x: Shaped[Array, "B *rest"]) -> Shaped[Array, "R *rest"]:
    """The rows of all devices among which the vocabulary is divided.

    The backward pass adds up what the devices, each from its part of the vocabulary,
    say of every row.
    """
    rows, tensor = _vocabulary_axes()
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return _joined_rows(rows, x)
    return _shared_rows(rows, tensor, x) if rows or tensor else x


def local_rows(x: Shaped[Array, "R *rest"]) -> Shaped[Array, "B *rest"]:
    """This device's rows of `shared_rows`, of which all devices say the same."""
    rows, _ = _vocabulary_axes()
    if not rows:
        return x
    differentiable = jnp.issubdtype(x.dtype, jnp.floating)
    return _own_rows(rows, x) if differentiable else _own_part(x, rows)


def reduce_scatter_rows(x: Float[Array, "R *rest"]) -> Float[Array, "B *rest"]:
    """This device's rows of what the devices made, each of its part, added up."""
    rows, tensor = _vocabulary_axes()
    return _summed_rows(rows, tensor, x) if rows or tensor else x


def _joined_rows(rows: Axes, x: Array) -> Array:
    return jax.lax.all_gather(x, rows, axis=0, tiled=True) if rows else x


def _added_rows(rows: Axes, tensor: Axes, x: Array) -> Array:
    x = jax.lax.psum(x, tensor) if tensor else x
    return jax.lax.psum_scatter(x, rows, tiled=True) if rows else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _shared_rows(rows, tensor, x):
    return _joined_rows(rows, x)


_shared_rows.defvjp(
    lambda rows, tensor, x: (_joined_rows(rows, x), None),
    lambda rows, tensor, _, g: (_added_rows(rows, tensor, g),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _own_rows(rows, x):
    return _own_part(x, rows)


_own_rows.defvjp(
    lambda rows, x: (_own_part(x, rows), None),
    lambda rows, _, g: (_joined_rows(rows, g),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _summed_rows(rows, tensor, x):
    return _added_rows(rows, tensor, x)


_summed_rows.defvjp(
    lambda rows, tensor, x: (_added_rows(rows, tensor, x), None),
    lambda rows, tensor, _, g: (_joined_rows(rows, g),),
)
