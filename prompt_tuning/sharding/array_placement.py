"""Places a model's arrays on a mesh, and gathers them."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, SingleDeviceSharding

from prompt_tuning.checkpoints.run_store.orbax_arrays import StoredArray
from prompt_tuning.checkpoints.stored_tensors import PartReader
from prompt_tuning.core.array_slices import Block, clipped, extent
from prompt_tuning.core.parameters import ParameterAxes, logical_axes, merge
from prompt_tuning.core.recomputation import PINNED
from prompt_tuning.sharding.mesh_layout import MeshLayout

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class Placement:
    """Shardings of one model's parameters.

    A vocabulary that cannot be divided evenly is padded with zeros on the mesh. Trees
    passed to the methods may also hold arrays that belong to a parameter, e.g. an
    optimizer's moments: a leaf belongs to the parameter whose path is a key above it,
    if their shapes agree.

    Attributes:
      layout: the model's layout on the mesh.
      abstract: shape and dtype of every parameter by path, without padding.
      axes: logical axes of every parameter by path.
      shardings: sharding of every parameter by path.
    """

    layout: MeshLayout
    abstract: Mapping[str, jax.ShapeDtypeStruct]
    axes: Mapping[str, ParameterAxes]
    shardings: Mapping[str, NamedSharding]

    @classmethod
    def create(
        cls,
        layout: MeshLayout,
        graph: nnx.GraphDef,
        abstract: Mapping[str, jax.ShapeDtypeStruct],
    ) -> "Placement":
        """Computes the sharding of each parameter.

        Raises:
          InputError: if a dimension cannot be divided.
        """
        shapes: Any = dict(abstract)
        axes = logical_axes(merge(graph, shapes))
        return cls(layout, abstract, axes, layout.shardings(axes, abstract))

    def with_pinned(self, paths: Collection[str]) -> "Placement":
        """Moves some parameters to the hosts' pinned memory.

        Each device copies its shard of a block from there when it computes the block.
        """
        shardings = {
            path: NamedSharding(
                sharding.mesh,
                sharding.spec,
                memory_kind=PINNED if path in paths else None,
            )
            for path, sharding in self.shardings.items()
        }
        return dataclasses.replace(self, shardings=shardings)

    def padded_shape(self, path: str) -> tuple[int, ...]:
        """A parameter's shape on the mesh, with a padded vocabulary."""
        return self.layout.padded_shape(
            self.axes[path].names, self.abstract[path].shape
        )

    def put(self, path: str, array: np.ndarray | jax.Array | StoredArray) -> jax.Array:
        """Puts a parameter on the mesh; each process puts only its own shards."""
        if isinstance(array, StoredArray):
            return array.restore(self.padded_shape(path), self.shardings[path])
        if isinstance(array, jax.Array):
            if array.shape != self.padded_shape(path):
                array = jax.jit(self._pad_leaf, static_argnums=0)(path, array)
            return _put(array, self.shardings[path])
        return self.restore(path, lambda parts: [np.asarray(array[p]) for p in parts])

    def restore(self, path: str, read: PartReader) -> jax.Array:
        """Reads a parameter directly into its shards on the mesh.

        Each shard of this process is read once for all devices that hold it. Shards of
        other processes, and the vocabulary's padding, are not read.
        """
        shape, sharding = self.padded_shape(path), self.shardings[path]
        kind = sharding.memory_kind
        shards = distinct_shards(sharding, shape, sharding.addressable_devices)
        blocks = read(
            [clipped(block, self.abstract[path].shape) for block, _ in shards]
        )
        arrays = [
            jax.device_put(shard, SingleDeviceSharding(device, memory_kind=kind))
            for (block, devices), array in zip(shards, blocks, strict=True)
            for shard in [_pad_to(array, extent(block))]
            for device in devices
        ]
        return jax.make_array_from_single_device_arrays(shape, sharding, arrays)

    def pad(self, tree: Tree) -> Tree:
        """Pads the vocabulary of parameters with zeros; call it inside `jax.jit`."""
        return self._by_parameter(tree, self._pad_leaf, lambda leaf: leaf)

    def unpad(self, tree: Tree) -> Tree:
        """Removes the padding of `pad`; call it inside `jax.jit`."""

        def crop(path: str, leaf: jax.Array) -> jax.Array:
            return leaf[tuple(slice(size) for size in self.abstract[path].shape)]

        return self._by_parameter(tree, crop, lambda leaf: leaf)

    @functools.cached_property
    def crop(self) -> Callable[[Any], Any]:
        """Removes the padding of `pad`, outside `jax.jit`."""
        return jax.jit(self.unpad)

    def _pad_leaf(self, path: str, leaf: jax.Array) -> jax.Array:
        sizes = zip(self.padded_shape(path), leaf.shape, strict=True)
        return jnp.pad(leaf, [(0, padded - size) for padded, size in sizes])

    def put_tree(self, tree: Tree) -> Tree:
        """Puts a tree on the mesh.

        Arrays that belong to a parameter are sharded like it, the rest replicated.
        """
        return self._by_parameter(tree, self.put, self._put_replicated)

    def abstract_tree(self, tree: Tree) -> Tree:
        """Shapes and dtypes of a tree's arrays as stored, without padding."""
        return self._by_parameter(
            tree,
            lambda path, leaf: jax.ShapeDtypeStruct(
                self.abstract[path].shape, leaf.dtype
            ),
            lambda leaf: leaf,
        )

    def constrain(self, tree: Tree) -> Tree:
        """Constrains a tree to its shardings; call it inside `jax.jit`."""
        constrain = jax.lax.with_sharding_constraint
        return self._by_parameter(
            tree,
            lambda path, leaf: constrain(leaf, self.shardings[path]),
            lambda leaf: constrain(leaf, self.layout.replicated),
        )

    @functools.cached_property
    def replicate(self) -> Callable[[Any], Any]:
        """Gathers a tree's arrays on every device and removes their padding."""
        return jax.jit(self.unpad, out_shardings=self.layout.replicated)

    @functools.cached_property
    def largest_magnitudes(self) -> Callable[[Any], Any]:
        """Computes the largest absolute value of each array, on every device.

        The devices exchange only these numbers.
        """
        return jax.jit(largest_magnitudes, out_shardings=self.layout.replicated)

    def to_host(self, array: jax.Array) -> np.ndarray:
        """Copies an array of any sharding to this process's host."""
        return np.asarray(self._copy(array))

    @functools.cached_property
    def _copy(self) -> Any:
        return jax.jit(jnp.copy, out_shardings=self.layout.replicated)

    def put_batch(self, batch: Tree) -> Tree:
        """Shards a batch's arrays by row; rows may follow a micro-batch dimension."""
        sharding = NamedSharding(self.layout.mesh, self.layout.batch_spec(batch))
        return jax.tree.map(lambda x: _put(x, sharding), batch)

    def _put_replicated(self, leaf: Any) -> jax.Array:
        return _put(leaf, self.layout.replicated)

    def _by_parameter(
        self,
        tree: Tree,
        function: Callable[[str, Any], Any],
        otherwise: Callable[[Any], Any],
    ) -> Tree:
        """Applies one function to leaves that belong to a parameter, else another."""

        def apply(key_path: tuple, leaf: Any) -> Any:
            # The innermost key that is a parameter's path: `.mu['decoder/prompt']`.
            names = [getattr(key, "key", None) for key in key_path]
            path = next((n for n in reversed(names) if n in self.abstract), None)
            shape = np.shape(leaf)
            if path is None or shape not in (
                self.padded_shape(path),
                self.abstract[path].shape,
            ):
                return otherwise(leaf)
            return function(path, leaf)

        return jax.tree_util.tree_map_with_path(apply, tree)


def largest_magnitudes(tree: Tree) -> Tree:
    """Computes the largest absolute value of each array; call it inside `jax.jit`.

    NaN counts as infinite, because a maximum across devices ignores NaN. A vocabulary's
    padding is zero and does not change the result.
    """

    def largest(leaf: jax.Array) -> jax.Array:
        magnitude = jnp.abs(leaf.astype(jnp.float32))
        return jnp.max(jnp.where(jnp.isnan(magnitude), jnp.inf, magnitude), initial=0)

    return jax.tree.map(largest, tree)


def distinct_shards(
    sharding: NamedSharding, shape: tuple[int, ...], devices: Collection[Any]
) -> list[tuple[Block, list[Any]]]:
    """Returns the distinct shards of an array, each with those devices that hold it."""
    shards: dict[tuple, tuple[Block, list[Any]]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        if device in devices:
            block = clipped(index, shape)
            bounds = tuple((axis.start, axis.stop) for axis in block)
            shards.setdefault(bounds, (block, []))[1].append(device)
    return list(shards.values())


def _pad_to(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Appends zeros to every dimension up to a shape."""
    if array.shape == shape:
        return array
    result = np.zeros(shape, array.dtype)
    result[tuple(map(slice, array.shape))] = array
    return result


def _put(array: Any, sharding: NamedSharding) -> jax.Array:
    if isinstance(array, StoredArray):
        return array.restore(array.shape, sharding)
    if isinstance(array, jax.Array):
        # An array on one process's devices cannot be moved to other processes' devices,
        # and need not be: every process has its own copy and puts its own shards.
        if sharding.is_fully_addressable or not array.is_fully_addressable:
            return jax.device_put(array, sharding)
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            data = _put(jax.random.key_data(array), sharding)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    whole = np.asarray(array)
    return jax.make_array_from_callback(whole.shape, sharding, lambda i: whole[i])
