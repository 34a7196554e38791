"""Functions of a model and a batch's rows, run on a mesh: each device its own part."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import ParameterAxes, Parameters, logical_axes, merge
from prompt_tuning.sharding import collectives
from prompt_tuning.sharding.mesh_layout import MeshLayout

Tree = TypeVar("Tree")
Gradient = tuple[Parameters, Tree]

LARGEST_JOINED = 2**20
"""Numbers of a gradient that is joined with others before the devices' are added up."""


def map_rows(
    layout: MeshLayout | None,
    graph: nnx.GraphDef,
    function: Callable[[Parameters, Any], Tree],
) -> Callable[[Parameters, Any], Tree]:
    """A function of parameters and rows, run by each device on its rows.

    Args:
      layout: None for one device.
      graph: the model's structure.
      function: gives a tree of arrays that have the rows first, as what it is given.
    """
    if layout is None:
        return function

    def run(parameters: Parameters, rows: Any) -> Tree:
        axes = logical_axes(merge(graph, parameters))
        check_row_count(layout, len(jax.tree.leaves(rows)[0]))

        def on_device(parameters, rows):
            with collectives.use_layout(layout):
                return function(_unstacked_whole(parameters, axes), rows)

        found = jax.shard_map(
            on_device,
            mesh=layout.mesh,
            in_specs=(_specs(layout, parameters, axes), layout.row_spec),
            out_specs=layout.row_spec,
            check_vma=False,
        )(parameters, rows)
        # A process can read what all of its devices have whole.
        return jax.lax.with_sharding_constraint(found, layout.replicated)

    return run


def gradient_and_sums(
    layout: MeshLayout,
    graph: nnx.GraphDef,
    function: Callable[..., Gradient],
    trained: Parameters,
    frozen: Parameters,
    batch: Any,
    *given: Any,
) -> Gradient:
    """The gradient of what all rows add up to, from those of the devices' rows.

    The devices' gradients and sums are added up once, at the end: small ones that are
    added up over the same mesh axes in one exchange. What is fully sharded was added up
    on its way out of the blocks.

    Args:
      layout: the model's place on the mesh.
      graph: the model's structure.
      function: of trained and frozen parameters, a batch's rows and what else is
        given; gives the gradient of the trained ones, and a tree of float32 sums.
      trained: what is differentiated.
      frozen: what is not.
      batch: arrays that have rows first, or second behind micro-batches.
      given: trees that every device has whole.
    """

    def run(*arguments: Any) -> tuple[Parameters, Any, Any]:
        return *function(*arguments), ()

    gradient, sums, _ = _divided(layout, graph, run, trained, frozen, [batch], given)
    return gradient, sums


def gradient_and_rows(
    layout: MeshLayout,
    graph: nnx.GraphDef,
    function: Callable[..., Gradient],
    trained: Parameters,
    frozen: Parameters,
    batch: Any,
    of_rows: Any,
    *given: Any,
) -> Gradient:
    """As `gradient_of_sums`, of a function that gives arrays that have rows.

    Args:
      layout: the model's place on the mesh.
      graph: the model's structure.
      function: of trained and frozen parameters, a batch's rows, what there is of
        these rows and what else is given; gives the gradient of the trained ones, and
        a tree of arrays whose rows stand where the batch's do.
      trained: what is differentiated.
      frozen: what is not.
      batch: arrays that have rows first, or second behind micro-batches.
      of_rows: a tree of more such arrays.
      given: trees that every device has whole.
    """

    def run(*arguments: Any) -> tuple[Parameters, Any, Any]:
        gradient, found = function(*arguments)
        return gradient, (), found

    rows = [batch, of_rows]
    gradient, _, found = _divided(layout, graph, run, trained, frozen, rows, given)
    return gradient, found


def _divided(
    layout: MeshLayout,
    graph: nnx.GraphDef,
    function: Callable[..., tuple[Parameters, Any, Any]],
    trained: Parameters,
    frozen: Parameters,
    rows: Sequence[Any],
    given: Sequence[Any],
) -> tuple[Parameters, Any, Any]:
    """A gradient and a tree of sums, both added up, and a tree of arrays with rows.

    Args:
      layout: the model's place on the mesh.
      graph: the model's structure.
      function: gives a device's own, of trained and frozen parameters, `rows`, `given`.
      trained: what is differentiated.
      frozen: what is not.
      rows: a batch, and what else has rows where it has them.
      given: trees that every device has whole.
    """
    axes = logical_axes(merge(graph, trained | frozen))
    batch = rows[0]
    check_row_count(layout, batch.tokens.shape[-2])
    if batch.gold is not None:
        check_row_count(layout, batch.gold.shape[-1])

    def on_device(trained, frozen, *arguments):
        with collectives.use_layout(layout):
            whole, back = jax.vjp(lambda t: _unstacked_whole(t, axes), trained)
            others = _unstacked_whole(frozen, axes)
            gradient, sums, found = function(whole, others, *arguments)
            (gradient,) = back(gradient)
            return *_added_up(layout, gradient, axes, sums), found

    of_trained, of_frozen = (_specs(layout, x, axes) for x in (trained, frozen))
    divided, whole = layout.batch_spec(batch), PartitionSpec()
    specs = (of_trained, of_frozen, *[divided] * len(rows), *[whole] * len(given))
    return jax.shard_map(
        on_device,
        mesh=layout.mesh,
        in_specs=specs,
        out_specs=(of_trained, whole, divided),
        check_vma=False,
    )(trained, frozen, *rows, *given)


def check_row_count(layout: MeshLayout, rows: int) -> None:
    """Refuses a batch whose rows cannot be divided.

    Raises:
      InputError: with both numbers.
    """
    if rows % layout.row_parts:
        raise InputError(
            f"a batch of {rows} rows cannot be divided among {layout.row_parts} "
            f"devices along {' and '.join(layout.row_axes)}; choose a multiple of "
            f"{layout.row_parts} as DataSource.batch_size"
        )


def _specs(
    layout: MeshLayout, parameters: Parameters, axes: Mapping[str, ParameterAxes]
) -> dict[str, PartitionSpec]:
    return {path: layout.spec(path, axes[path].names) for path in parameters}


def _unstacked_whole(
    parameters: Parameters, axes: Mapping[str, ParameterAxes]
) -> Parameters:
    """The parameters, those of no block put together; each block puts its own."""
    stacked = {p: x for p, x in parameters.items() if axes[p].names[:1] == ("layers",)}
    single = {p: x for p, x in parameters.items() if p not in stacked}
    whole = collectives.gather_parameters(single, axes) | stacked
    return {path: whole[path] for path in parameters}


def _added_up(
    layout: MeshLayout,
    gradient: Parameters,
    axes: Mapping[str, ParameterAxes],
    sums: Tree,
) -> tuple[Parameters, Tree]:
    """The devices' gradients and sums added up, small ones at once."""
    leaves, structure = jax.tree.flatten(sums)
    groups: dict[tuple[str, ...], dict[Any, Array]] = {}
    for path, leaf in gradient.items():
        over = layout.gradient_axes(path, axes[path])
        groups.setdefault(over, {})[path] = leaf
    groups.setdefault(layout.row_axes, {}).update(enumerate(leaves))
    found: dict[Any, Array] = {}
    for over, arrays in groups.items():
        found |= _added_over(over, arrays) if over else arrays
    added = [found[i] for i in range(len(leaves))]
    return {p: found[p] for p in gradient}, jax.tree.unflatten(structure, added)


def _added_over(over: tuple[str, ...], arrays: dict[Any, Array]) -> dict[Any, Array]:
    small = {k: x for k, x in arrays.items() if x.size <= LARGEST_JOINED}
    found = {k: jax.lax.psum(x, over) for k, x in arrays.items() if k not in small}
    if not small:
        return found
    wide = jnp.result_type(jnp.float32, *small.values())
    flat = [x.astype(wide).ravel() for x in small.values()]
    joined, start = jax.lax.psum(jnp.concatenate(flat), over), 0
    for name, array in small.items():
        piece = joined[start : start + array.size]
        found[name] = piece.reshape(array.shape).astype(array.dtype)
        start += array.size
    return found
