"""The devices of one stage: how its programs are compiled and its arrays placed."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from prompt_tuning.core.parameters import ParameterAxes
from prompt_tuning.settings.axis_rules import MESH_AXES
from prompt_tuning.sharding import collectives
from prompt_tuning.sharding.mesh_layout import MeshLayout
from prompt_tuning.sharding.shard_map import gather_unstacked, reduce_gradient

Tree = Any
PER_DEVICE = PartitionSpec(MESH_AXES)
"""Arrays of which each device has its own, in a first dimension of all devices."""
WHOLE = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class StageDevices:
    """The devices of one stage.

    Attributes:
      device: the first of them.
      layout: the model's layout on the stage's mesh; None with one device.
    """

    device: Any
    layout: MeshLayout | None = None

    @property
    def process(self) -> int:
        """The process with these devices."""
        return self.device.process_index

    @property
    def is_local(self) -> bool:
        """Whether they are this process's."""
        return self.process == jax.process_index()

    @property
    def grid(self) -> Any:
        """The devices along each mesh axis, nested lists."""
        return [[[self.device]]] if self.layout is None else self.layout.mesh.devices

    @property
    def rows(self) -> PartitionSpec:
        """The PartitionSpec of a micro-batch's arrays."""
        return WHOLE if self.layout is None else self.layout.row_spec

    def specs(
        self, paths: Sequence[str], axes: Mapping[str, ParameterAxes]
    ) -> dict[str, PartitionSpec]:
        """Returns the PartitionSpec of each parameter."""
        if self.layout is None:
            return dict.fromkeys(paths, WHOLE)
        return {path: self.layout.spec(path, axes[path].names) for path in paths}

    def sharding(self, spec: PartitionSpec) -> Any:
        """Returns the sharding of an array on these devices."""
        if self.layout is None:
            return SingleDeviceSharding(self.device)
        return NamedSharding(self.layout.mesh, spec)

    def put(self, tree: Tree, specs: Any) -> Tree:
        """Puts arrays on the devices; `specs` may be one PartitionSpec or a tree."""
        shardings = jax.tree.map(
            self.sharding, specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
        )
        return jax.device_put(jax.tree.map(_own_copy, tree), shardings)

    def map(
        self, function: Callable[..., Tree], specs: Sequence[Any], results: Any
    ) -> Callable[..., Tree]:
        """Returns a function that each device runs on its own shards."""
        layout = self.layout
        if layout is None:
            return function

        def on_device(*arguments: Any) -> Tree:
            local_specs = [
                jax.tree.map(lambda x: x[0], argument)
                if spec is PER_DEVICE
                else argument
                for argument, spec in zip(arguments, specs, strict=True)
            ]
            with collectives.use_layout(layout):
                outputs = function(*local_specs)
            if results is PER_DEVICE:
                outputs = jax.tree.map(lambda x: jnp.asarray(x)[None], outputs)
            return outputs

        return jax.shard_map(
            on_device,
            mesh=layout.mesh,
            in_specs=tuple(specs),
            out_specs=results,
            check_vma=False,
        )

    def gather(
        self, parameters: Mapping[str, Any], axes: Mapping[str, ParameterAxes]
    ) -> dict[str, Any]:
        """Gathers the parameters outside blocks, within a function of one device."""
        if self.layout is None:
            return dict(parameters)
        return gather_unstacked(dict(parameters), axes)

    def reduce(
        self, gradient: dict[str, Any], axes: Mapping[str, ParameterAxes], sums: Tree
    ) -> tuple[dict[str, Any], Tree]:
        """Sums the devices' gradients and sums, within a function of one device."""
        if self.layout is None:
            return gradient, sums
        return reduce_gradient(self.layout, gradient, axes, sums)

    def shapes(self, tree: Tree) -> Tree:
        """Returns the shapes of arrays with one part per device."""
        if self.layout is None:
            return tree
        count = self.layout.mesh.size
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), tree
        )

    def local(self, tree: Tree, specs: Any) -> Tree:
        """Returns the shapes of one device's shards of arrays on all devices.

        `tree` may have shapes instead, and `specs` is one PartitionSpec, or one for
        each array.
        """

        def shape(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            local_shape = self.sharding(spec).shard_shape(leaf.shape)
            return jax.ShapeDtypeStruct(local_shape, leaf.dtype)

        if isinstance(specs, PartitionSpec):
            return jax.tree.map(lambda leaf: shape(leaf, specs), tree)
        return {path: shape(leaf, specs[path]) for path, leaf in tree.items()}

    def trace(self, function: Callable[..., Any]) -> Any:
        """Calls a function as one device's program is traced, and returns its result.

        The result may be anything that the traces of this mesh can use.
        """
        results = []

        def run() -> Any:
            results.append(function())
            return jnp.zeros(())

        jax.eval_shape(self.map(run, (), WHOLE))
        return results[0]


def _own_copy(array: Any) -> Any:
    """Returns this process's copy of an array that other processes have, too."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return array
    return array.addressable_data(0)
