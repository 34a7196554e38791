"""Joins the results of all stages into whole arrays, also across processes.

The parts of the stages become one array with a dimension of stages, without a copy:
each stage holds its own part. With virtual stages there is one such array for the
stages' first chunks, one for the second chunks, and so on. `take_rows` does the
opposite: it takes a stage's part of whole parameters.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from prompt_tuning.core.parameters import ParameterAxes, Parameters
from prompt_tuning.pipeline.stage_devices import WHOLE, StageDevices
from prompt_tuning.pipeline.staged_model import StagedModel
from prompt_tuning.settings.axis_rules import MESH_AXES, STAGE


class GradientJoin:
    """Joins the stages' gradients, and the sums of the loss, to whole arrays."""

    def __init__(
        self,
        stages: Sequence[StageDevices],
        model: StagedModel,
        axes: Mapping[str, ParameterAxes],
        shapes: Mapping[str, jax.ShapeDtypeStruct],
        padded: Mapping[str, jax.ShapeDtypeStruct],
    ):
        """Sets the join up; nothing is compiled yet.

        Args:
          stages: the devices of each stage, or of each chunk.
          model: what each stage computes.
          axes: logical axes of each parameter.
          shapes: shapes of all parameters without padding.
          padded: their shapes, padded as a stage's mesh needs them.
        """
        self._count = len({stage.device for stage in stages})
        self._rounds = range(0, len(stages), self._count)
        grids = [stage.grid for stage in stages[: self._count]]
        self._mesh = Mesh(np.array(grids, object), (STAGE, *MESH_AXES))
        self._model, self._shapes, self._padded = model, shapes, padded
        self._specs = stages[0].specs(list(shapes), axes)
        self._program: Any = None

    def part(self, path: str, gradient: Any) -> Any:
        """Returns a stage's gradient as its part of the stacked one, `[1, ...]`.

        It is padded to as many rows as the largest stage has.
        """
        if path in self._model.sliced:
            gradient = pad(gradient, (max(self._rows(path)), *gradient.shape[1:]))
        return gradient[None]

    def _rows(self, path: str) -> list[int]:
        stack = self._model.sliced[path]
        return [len(blocks.get(stack, ())) for blocks in self._model.blocks]

    def __call__(
        self,
        trained: Parameters,
        parts: Mapping[int, Mapping[str, Any]],
        shapes: Mapping[int, jax.ShapeDtypeStruct],
        sums: Mapping[int, Mapping[int, Any]],
    ) -> tuple[Parameters, list[jax.Array]]:
        """Joins the gradients and the sums.

        Args:
          trained: the trained parameters.
          parts: gradients of this process's stages, or chunks; see `part`.
          shapes: shapes of each of the loss's sums.
          sums: the sums of this process's stages; only the last stage has any.
        """
        stacked = [
            {
                path: self._stack(
                    self._round(parts, first),
                    path,
                    self._part_shape(path, x),
                    self._specs[path],
                )
                for path, x in trained.items()
            }
            for first in self._rounds
        ]
        totals = {i: self._stack(sums, i, x, WHOLE) for i, x in shapes.items()}
        homes = {path: leaf.sharding for path, leaf in trained.items()}
        devices = set(self._mesh.devices.flat)
        at_home = all(home.device_set == devices for home in homes.values())
        if self._program is None:
            self._program = self._compile(trained, homes if at_home else None)
        gradient, totals = self._program(stacked, totals)
        if at_home:
            return gradient, totals
        home = replicated(next(iter(homes.values())))
        return jax.device_put((gradient, totals), (homes, home))

    def _round(self, parts: Mapping[int, Any], first: int) -> dict[int, Any]:
        """Returns the parts of each stage's next chunk, from stage 0's on."""
        stop = first + self._count
        return {place: part for place, part in parts.items() if first <= place < stop}

    def _part_shape(self, path: str, trained: jax.Array) -> jax.ShapeDtypeStruct:
        shape = self._padded[path].shape
        if path in self._model.sliced:
            shape = (max(self._rows(path)), *shape[1:])
        return jax.ShapeDtypeStruct((1, *shape), trained.dtype)

    def _stack(
        self,
        parts: Mapping[int, Mapping[Any, Any]],
        name: Any,
        part: jax.ShapeDtypeStruct,
        spec: PartitionSpec,
    ) -> jax.Array:
        """Stacks one array of each stage; missing ones are 0."""
        sharding = NamedSharding(self._mesh, PartitionSpec(STAGE, *spec))
        shape = (self._mesh.shape[STAGE], *part.shape[1:])
        local = {
            shard.device: shard.data
            for arrays in parts.values()
            if name in arrays
            for shard in arrays[name].addressable_shards
        }
        sizes = sharding.shard_shape(shape)
        arrays = [
            local[device] if device in local else _zeros(sizes, part.dtype, device)()
            for device in self._mesh.devices.flat
            if device.process_index == jax.process_index()
        ]
        return jax.make_array_from_single_device_arrays(shape, sharding, arrays)

    def _compile(self, trained: Parameters, homes: Mapping[str, Any] | None) -> Any:
        """Returns the program that joins the stacked arrays.

        `homes` are the shardings of the gradient; None if the mesh has other devices.
        """
        shardings = None
        if homes is not None:
            shardings = homes, replicated(next(iter(homes.values())))
        sizes = {path: leaf.shape for path, leaf in trained.items()}

        def join(rounds: Sequence[Mapping[str, Any]], sums: Mapping[int, Any]) -> Any:
            gradient = {}
            for path in sizes:
                parts = [part[path] for part in rounds]
                if path in self._model.sliced:
                    whole = self._together(path, parts)
                else:
                    whole = jnp.sum(jnp.concatenate(parts), 0)
                real = tuple(map(slice, self._shapes[path].shape))
                gradient[path] = pad(whole[real], sizes[path])
            return gradient, [jnp.sum(sums[i]) for i in sorted(sums)]

        return jax.jit(join, out_shardings=shardings)

    def _together(self, path: str, parts: Sequence[jax.Array]) -> jax.Array:
        """Joins the rows of each stage, `[N, rows, ...]`, to `[all rows, ...]`."""
        rows = itertools.chain.from_iterable(parts)
        counts = zip(rows, self._rows(path), strict=True)
        return jnp.concatenate([part[:count] for part, count in counts])


@functools.cache
def _zeros(shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    return jax.jit(
        lambda: jnp.zeros(shape, dtype), out_shardings=SingleDeviceSharding(device)
    )


def pad(array: Any, shape: Sequence[int]) -> Any:
    """Pads an array with zeros to a shape."""
    sizes = zip(shape, array.shape, strict=True)
    return jnp.pad(array, [(0, padded - size) for padded, size in sizes])


def replicated(sharding: Any) -> Any:
    """Returns the sharding of whole arrays on the same devices."""
    mesh = getattr(sharding, "mesh", None)
    return sharding if mesh is None else NamedSharding(mesh, WHOLE)


class FrozenParts:
    """Frozen parameters on the devices of the stages, which pipelines share."""

    def __init__(self):
        """Starts with none."""
        self._frozen: Parameters | None = None
        self._parts: dict[tuple, Any] = {}

    def of(self, frozen: Parameters) -> dict[tuple, Any]:
        """Returns the parts of these parameters by device, path and rows."""
        if self._frozen is not frozen:
            self._frozen, self._parts = frozen, {}
        return self._parts


def take_rows(
    rows: Mapping[str, slice],
    whole: Mapping[str, jax.ShapeDtypeStruct],
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    parameters: Parameters,
) -> Parameters:
    """Returns some rows of parameters, padded as a stage needs them.

    Args:
      rows: the rows.
      whole: shapes of the parameters without padding.
      shapes: shapes of the results.
      parameters: the parameters, possibly padded for another mesh.
    """
    taken = {}
    for path, array in parameters.items():
        part = array[tuple(map(slice, whole[path].shape))]
        part = part[rows[path]] if array.ndim else part
        taken[path] = pad(part, shapes[path].shape)
    return taken


def on_all_processes(parameters: Parameters) -> Any:
    """Returns a sharding that gives every process whole arrays; None in one process."""
    homes = {x.sharding for x in parameters.values() if not x.is_fully_addressable}
    return replicated(homes.pop()) if homes else None
