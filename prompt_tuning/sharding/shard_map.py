"""Runs functions of a model and a batch on a mesh, each device on its own shards."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array

from prompt_tuning.core.parameters import ParameterAxes, Parameters, logical_axes, merge
from prompt_tuning.core.row_division import RowDivision
from prompt_tuning.sharding import collectives, parameter_gathering
from prompt_tuning.sharding.mesh_layout import MeshLayout

Tree = TypeVar("Tree")

LARGEST_JOINED = 2**20
"""Maximum size of a gradient array that shares one all-reduce with others."""


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
    gathered = parameter_gathering.gather_parameters(single, axes) | stacked
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
