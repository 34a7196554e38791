"""Gathers fully sharded parameters where they are used, one block at a time."""

import functools
from collections.abc import Iterator, Mapping

import jax
from jaxtyping import Array

from prompt_tuning.core.parameters import ParameterAxes
from prompt_tuning.settings.axis_rules import ROW_AXES, axes_of
from prompt_tuning.sharding.collectives import Axes, current_layout, local_slice
from prompt_tuning.sharding.mesh_layout import NEVER_GATHERED, MeshLayout


def gather_parameters(
    parameters: Mapping[str, Array], axes: Mapping[str, ParameterAxes]
) -> dict[str, Array]:
    """All-gathers parameters along every dimension except those computed in shards.

    `parameters` are some of the model's, e.g. one block's. A leading "layers" in their
    `axes` is skipped if the array has no such dimension.
    """
    layout = current_layout()
    if layout is None:
        return dict(parameters)
    return {
        path: _gather_parameter(layout, path, array, axes[path])
        for path, array in parameters.items()
    }


def _gather_parameter(
    layout: MeshLayout, path: str, array: Array, axes: ParameterAxes
) -> Array:
    # A block's slice of a stacked parameter has lost the leading "layers".
    skipped = len(axes.names) - array.ndim
    # Along these axes the devices' gradients differ: they have different rows, share a
    # key/value head, or have different columns of an adapter's kernel.
    differing = (*ROW_AXES, *layout.partial_axes(axes))
    for dimension, mesh_axes in _gathered_dimensions(layout, path, axes.names):
        # The last of several mesh axes varies fastest, so it is gathered first.
        for axis in reversed(mesh_axes):
            array = _all_gather(axis, dimension - skipped, axis in differing, array)
    return array


def _gathered_dimensions(
    layout: MeshLayout, path: str, names: tuple[str, ...]
) -> Iterator[tuple[int, Axes]]:
    """Yields each gathered dimension with its mesh axes."""
    spec = layout.spec(path, names)
    for dimension, (name, entry) in enumerate(zip(names, spec, strict=True)):
        if name not in NEVER_GATHERED:
            yield dimension, layout.used_axes(axes_of(entry))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _all_gather(axis, dimension, differing, shard):
    del differing
    return jax.lax.all_gather(shard, axis, axis=dimension, tiled=True)


def _all_gather_backward(axis, dimension, differing, _, g):
    if differing:
        return (jax.lax.psum_scatter(g, axis, scatter_dimension=dimension, tiled=True),)
    # Every device has the same gradient already: a sum would count it several times.
    return (local_slice(g, (axis,), dimension),)


_all_gather.defvjp(
    lambda axis, dimension, differing, shard: (
        _all_gather(axis, dimension, differing, shard),
        None,
    ),
    _all_gather_backward,
)


def needs_gather(names: tuple[str, ...], path: str) -> bool:
    """Whether a parameter is gathered where it is used."""
    layout = current_layout()
    if layout is None:
        return False
    return any(axes for _, axes in _gathered_dimensions(layout, path, names))
