"""Runs functions of a model and a batch on a mesh, each device on its own shards.

Fully sharded parameters are gathered where they are used, one block at a time.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array

from prompt_tuning.core.batch import RowDivision
from prompt_tuning.core.parameters import ParameterAxes, Parameters, logical_axes, merge
from prompt_tuning.settings.axis_rules import ROW_AXES, axes_of
from prompt_tuning.sharding import collectives
from prompt_tuning.sharding.collectives import Axes, current_layout, local_slice
from prompt_tuning.sharding.mesh_layout import NEVER_GATHERED, MeshLayout

Tree = TypeVar("Tree")

LARGEST_JOINED = 2**20
"""Maximum size of a gradient array that shares one all-reduce with others."""


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


def map_rows(
    layout: MeshLayout | None,
    graph: nnx.GraphDef,
    function: Callable[[Parameters, Any], Tree],
) -> Callable[[Parameters, Any], Tree]:
    """Returns a function of parameters and rows that each device runs on its rows.

    `function` takes and returns trees of arrays with rows as first dimension. A
    `layout` of None means one device.
    """
    if layout is None:
        return function

    def run(parameters: Parameters, rows: Any) -> Tree:
        axes = logical_axes(merge(graph, parameters))
        check_row_count(layout, len(jax.tree.leaves(rows)[0]))

        def on_device(parameters, rows):
            with collectives.use_layout(layout):
                return function(gather_unstacked(parameters, axes), rows)

        outputs = jax.shard_map(
            on_device,
            mesh=layout.mesh,
            in_specs=(_specs(layout, parameters, axes), layout.row_spec),
            out_specs=layout.row_spec,
            check_vma=False,
        )(parameters, rows)
        # Replicated, because a process can read only what its own devices have.
        return jax.lax.with_sharding_constraint(outputs, layout.replicated)

    return run


def gradient_on_shards(
    layout: MeshLayout,
    graph: nnx.GraphDef,
    function: Callable[..., tuple[Parameters, Any, Any]],
    trained: Parameters,
    frozen: Parameters,
    rows: Sequence[Any],
    replicated: Sequence[Any] = (),
) -> tuple[Parameters, Any, Any]:
    """Computes the gradient over all rows, each device from its own rows.

    The devices' gradients and sums are all-reduced once, at the end; small arrays
    reduced over the same mesh axes share one all-reduce. The gradient of a fully
    sharded parameter is already reduced when it leaves its block.

    Args:
      layout: the model's layout on the mesh.
      graph: the model's structure.
      function: takes trained and frozen parameters, a device's part of each of `rows`,
        and `replicated`; returns the gradient of the trained parameters, a tree of
        float32 sums, and a tree of arrays with rows in the batch's row dimension.
      trained: parameters to differentiate.
      frozen: all other parameters.
      rows: the batch, with rows first, or second after micro-batches; then more trees
        of such arrays.
      replicated: trees that every device has in full.

    Returns:
      the gradient, the sums, and the arrays, which stay sharded by row.
    """
    axes = logical_axes(merge(graph, trained | frozen))
    batch = rows[0]
    check_row_count(layout, batch.tokens.shape[-2])
    if batch.gold is not None:
        # Ranked examples: each has several rows and one gold index.
        check_row_count(layout, batch.gold.shape[-1])

    def on_device(trained, frozen, *arguments):
        with collectives.use_layout(layout):
            # The gather is differentiated separately from `function`, so that the
            # gradient of a gathered parameter is reduce-scattered once per step.
            whole, pull_back = jax.vjp(lambda t: gather_unstacked(t, axes), trained)
            gathered = gather_unstacked(frozen, axes)
            gradient, sums, outputs = function(whole, gathered, *arguments)
            (gradient,) = pull_back(gradient)
            return *reduce_gradient(layout, gradient, axes, sums), outputs

    trained_specs, frozen_specs = (_specs(layout, x, axes) for x in (trained, frozen))
    sharded, whole = layout.batch_spec(batch), PartitionSpec()
    # (trained, frozen, *rows, *replicated) -> (gradient, sums, outputs)
    return jax.shard_map(
        on_device,
        mesh=layout.mesh,
        in_specs=(
            trained_specs,
            frozen_specs,
            *[sharded] * len(rows),
            *[whole] * len(replicated),
        ),
        out_specs=(trained_specs, whole, sharded),
        check_vma=False,
    )(trained, frozen, *rows, *replicated)


def check_row_count(layout: MeshLayout, rows: int) -> None:
    """Checks that a batch can be divided among the devices.

    Raises:
      InputError: if not; gives both numbers.
    """
    RowDivision(layout.row_parts, tuple(layout.row_axes)).check(rows)


def _specs(
    layout: MeshLayout, parameters: Parameters, axes: Mapping[str, ParameterAxes]
) -> dict[str, PartitionSpec]:
    return {path: layout.spec(path, axes[path].names) for path in parameters}


def gather_unstacked(
    parameters: Parameters, axes: Mapping[str, ParameterAxes]
) -> Parameters:
    """Gathers the parameters outside blocks; each block gathers its own."""
    stacked = {p: x for p, x in parameters.items() if axes[p].names[:1] == ("layers",)}
    single = {p: x for p, x in parameters.items() if p not in stacked}
    gathered = gather_parameters(single, axes) | stacked
    return {path: gathered[path] for path in parameters}


def reduce_gradient(
    layout: MeshLayout,
    gradient: Parameters,
    axes: Mapping[str, ParameterAxes],
    sums: Tree,
) -> tuple[Parameters, Tree]:
    """Sums the devices' gradients, each over its own mesh axes, and the sums."""
    leaves, structure = jax.tree.flatten(sums)
    # Arrays by the mesh axes that they are reduced over; sums by their number.
    groups: dict[tuple[str, ...], dict[Any, Array]] = {}
    for path, leaf in gradient.items():
        over = layout.gradient_axes(path, axes[path])
        groups.setdefault(over, {})[path] = leaf
    groups.setdefault(layout.row_axes, {}).update(enumerate(leaves))
    reduced: dict[Any, Array] = {}
    for over, arrays in groups.items():
        reduced |= _all_reduce_over(over, arrays) if over else arrays
    reduced_sums = [reduced[i] for i in range(len(leaves))]
    return (
        {path: reduced[path] for path in gradient},
        jax.tree.unflatten(structure, reduced_sums),
    )


def _all_reduce_over(
    over: tuple[str, ...], arrays: dict[Any, Array]
) -> dict[Any, Array]:
    """Sums arrays over some mesh axes, all small ones in one all-reduce."""
    small = {k: x for k, x in arrays.items() if x.size <= LARGEST_JOINED}
    reduced = {k: jax.lax.psum(x, over) for k, x in arrays.items() if k not in small}
    if not small:
        return reduced
    # One flat array in the widest type, so that no array is reduced in less.
    wide = jnp.result_type(jnp.float32, *small.values())
    flat = [x.astype(wide).ravel() for x in small.values()]
    joined, start = jax.lax.psum(jnp.concatenate(flat), over), 0
    for name, array in small.items():
        part = joined[start : start + array.size]
        reduced[name] = part.reshape(array.shape).astype(array.dtype)
        start += array.size
    return reduced
