"""A model's arrays on a mesh: put there, and taken back whole."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from prompt_tuning.checkpoints.run_store.orbax_arrays import StoredArray
from prompt_tuning.checkpoints.stored_tensors import PartReader
from prompt_tuning.core.parameters import ParameterAxes, logical_axes, merge
from prompt_tuning.core.slices import Block, clipped, extent
from prompt_tuning.sharding.mesh_layout import MeshLayout

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the parameters of one model lie.

    Attributes:
      layout: of the model on the mesh.
      abstract: shape and dtype of every parameter, by path.
      axes: the parameters' dimensions.
      shardings: of each parameter.
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
        """Finds each parameter's place.

        Raises:
          InputError: if a dimension cannot be divided.
        """
        shapes: Any = dict(abstract)
        axes = logical_axes(merge(graph, shapes))
        return cls(layout, abstract, axes, layout.shardings(axes, abstract))

    def padded_shape(self, path: str) -> tuple[int, ...]:
        """A parameter's shape on the mesh, the vocabulary so long that it divides."""
        return self.layout.padded_shape(
            self.axes[path].names, self.abstract[path].shape
        )

    def put(self, path: str, array: np.ndarray | jax.Array | StoredArray) -> jax.Array:
        """A parameter on the mesh; of each process only its own parts are put."""
        if isinstance(array, StoredArray):
            return array.restore(self.padded_shape(path), self.shardings[path])
        if isinstance(array, jax.Array):
            if array.shape != self.padded_shape(path):
                array = jax.jit(self._filled, static_argnums=0)(path, array)
            return _put(array, self.shardings[path])
        return self.restore(path, lambda parts: [np.asarray(array[p]) for p in parts])

    def restore(self, path: str, read: PartReader) -> jax.Array:
        """A parameter read straight into its parts on the mesh.

        Each part that this process has is read once, for all of its devices that have
        it; the others are not read.

        Args:
          path: of the parameter.
          read: reads parts of it; what the vocabulary is padded by is not asked for.
        """
        shape, sharding = self.padded_shape(path), self.shardings[path]
        parts = distinct_shards(sharding, shape, sharding.addressable_devices)
        found = read([clipped(part, self.abstract[path].shape) for part, _ in parts])
        arrays = [
            jax.device_put(own, device)
            for (part, devices), array in zip(parts, found, strict=True)
            for own in [_padded(array, extent(part))]
            for device in devices
        ]
        return jax.make_array_from_single_device_arrays(shape, sharding, arrays)

    def pad(self, tree: Tree) -> Tree:
        """Parameters' arrays with zeros for what the vocabulary is longer by.

        To be jitted; see `put_tree` for what else the tree may hold.
        """
        return self._by_parameter(tree, self._filled, lambda leaf: leaf)

    def unpad(self, tree: Tree) -> Tree:
        """The inverse of `filled`, to be jitted too."""

        def crop(path: str, leaf: jax.Array) -> jax.Array:
            return leaf[tuple(slice(size) for size in self.abstract[path].shape)]

        return self._by_parameter(tree, crop, lambda leaf: leaf)

    def _filled(self, path: str, leaf: jax.Array) -> jax.Array:
        sizes = zip(self.padded_shape(path), leaf.shape, strict=True)
        return jnp.pad(leaf, [(0, size - found) for size, found in sizes])

    def put_tree(self, tree: Tree) -> Tree:
        """Arrays that hang on parameters' paths, such as an optimiser's averages.

        What has its parameter's shape lies as it does, all else is whole everywhere.
        """
        return self._by_parameter(tree, self.put, self._put_whole)

    def abstract_tree(self, tree: Tree) -> Tree:
        """Shapes and types of such arrays as they are kept, without padding."""
        return self._by_parameter(
            tree,
            lambda path, leaf: jax.ShapeDtypeStruct(
                self.abstract[path].shape, leaf.dtype
            ),
            lambda leaf: leaf,
        )

    def constrain(self, tree: Tree) -> Tree:
        """Such arrays inside a jitted function, told where they lie."""
        constrain = jax.lax.with_sharding_constraint
        return self._by_parameter(
            tree,
            lambda path, leaf: constrain(leaf, self.shardings[path]),
            lambda leaf: constrain(leaf, self.layout.replicated),
        )

    def replicate(self, tree: Tree) -> Tree:
        """Such arrays whole on every device, and without padding."""
        return self._gather(tree)

    @functools.cached_property
    def _gather(self) -> Any:
        return jax.jit(self.unpad, out_shardings=self.layout.replicated)

    def largest_magnitudes(self, tree: Tree) -> Tree:
        """Of each of such arrays its largest absolute value, on every device.

        The devices exchange these numbers and no array.
        """
        return self._reduce(tree)

    @functools.cached_property
    def _reduce(self) -> Any:
        return jax.jit(largest_magnitudes, out_shardings=self.layout.replicated)

    def to_host(self, array: jax.Array) -> np.ndarray:
        """An array that lies anywhere, on this process's host."""
        return np.asarray(self._copy(array))

    @functools.cached_property
    def _copy(self) -> Any:
        return jax.jit(jnp.copy, out_shardings=self.layout.replicated)

    def put_batch(self, batch: Tree) -> Tree:
        """A batch's arrays, which have rows first, or second behind micro-batches."""
        sharding = NamedSharding(self.layout.mesh, self.layout.batch_spec(batch))
        return jax.tree.map(lambda x: _put(x, sharding), batch)

    def _put_whole(self, leaf: Any) -> jax.Array:
        return _put(leaf, self.layout.replicated)

    def _by_parameter(
        self,
        tree: Tree,
        function: Callable[[str, Any], Any],
        otherwise: Callable[[Any], Any],
    ) -> Tree:
        def apply(key_path: tuple, leaf: Any) -> Any:
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
    """The largest absolute value of each array, to be jitted.

    NaN counts as infinite: the largest of several devices' numbers passes over it. What
    pads a vocabulary is zero and changes nothing.
    """

    def largest(leaf: jax.Array) -> jax.Array:
        size = jnp.abs(leaf.astype(jnp.float32))
        return jnp.max(jnp.where(jnp.isnan(size), jnp.inf, size), initial=0)

    return jax.tree.map(largest, tree)


def distinct_shards(
    sharding: NamedSharding, shape: tuple[int, ...], devices: Collection[Any]
) -> list[tuple[Block, list[Any]]]:
    """The different parts of an array that some devices have, each with its devices."""
    found: dict[tuple, tuple[Block, list[Any]]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        if device in devices:
            part = clipped(index, shape)
            bounds = tuple((axis.start, axis.stop) for axis in part)
            found.setdefault(bounds, (part, []))[1].append(device)
    return list(found.values())


def _padded(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """An array with zeros behind what there is of it."""
    if array.shape == shape:
        return array
    result = np.zeros(shape, array.dtype)
    result[tuple(map(slice, array.shape))] = array
    return result


def _put(array: Any, sharding: NamedSharding) -> jax.Array:
    if isinstance(array, StoredArray):
        return array.restore(array.shape, sharding)
    if isinstance(array, jax.Array):
        # What one process has alone is not moved to the others' devices: all have it.
        if sharding.is_fully_addressable or not array.is_fully_addressable:
            return jax.device_put(array, sharding)
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            data = _put(jax.random.key_data(array), sharding)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    whole = np.asarray(array)
    return jax.make_array_from_callback(whole.shape, sharding, lambda i: whole[i])
