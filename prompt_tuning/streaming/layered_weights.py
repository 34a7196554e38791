"""Weights that stay in their file, and a reader that prefetches one layer."""

import dataclasses
import gc
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from prompt_tuning.checkpoints.stored_tensors import PartReader
from prompt_tuning.core.array_slices import Block, whole
from prompt_tuning.core.compilation import return_freed_memory
from prompt_tuning.settings.axis_rules import ROW_AXES, axes_of
from prompt_tuning.sharding.array_placement import distinct_shards

Layer = list[Array]


@dataclasses.dataclass(frozen=True)
class LayeredWeight:
    """A parameter of all blocks of a stack, with no block on the device.

    Attributes:
      path: path of the parameter.
      shape: shape of all layers, `[L, ...]`.
      dtype: dtype in the model; each layer is cast, or quantized, as it is read.
      reader: reads slices of the parameter.
      sharding: sharding of one layer on a mesh; None on one device.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    reader: PartReader
    sharding: NamedSharding | None = None

    @classmethod
    def from_array(cls, path: str, array: np.ndarray) -> "LayeredWeight":
        """Wraps a parameter in host memory, which may change there."""

        def read(parts: Sequence[Block]) -> list[np.ndarray]:
            return [np.array(array[part]) for part in parts]

        return cls(path, array.shape, array.dtype, read)

    @property
    def size(self) -> int:
        """Number of elements of all layers."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes of all layers, in the model's dtype."""
        return self.size * self.dtype.itemsize

    @property
    def abstract(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype, for tracing."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    @property
    def abstract_layer(self) -> jax.ShapeDtypeStruct:
        """Shape, dtype and sharding of one layer."""
        return jax.ShapeDtypeStruct(self.shape[1:], self.dtype, sharding=self.sharding)

    @property
    def gathered(self) -> NamedSharding | None:
        """Sharding of a layer while it is computed: gathered for each device's rows."""
        if self.sharding is None:
            return None
        spec = [
            tuple(axis for axis in axes_of(entry) if axis not in ROW_AXES) or None
            for entry in self.sharding.spec
        ]
        return NamedSharding(self.sharding.mesh, PartitionSpec(*spec))

    def read(self, index: int) -> Shaped[np.ndarray, "*layer"]:
        """Reads one layer into newly allocated memory.

        Raises:
          InputError: if the checkpoint has changed since it was opened.
        """
        return self.read_layers(index, index + 1)[0]

    def read_layers(self, start: int, stop: int) -> Shaped[np.ndarray, "n *layer"]:
        """Reads consecutive layers; see `read`."""
        return self.reader([(slice(start, stop), *whole(self.shape[1:]))])[0]

    def put_layers(self, start: int, stop: int, pool: Executor) -> list[Array]:
        """Reads layers from `start` up to `stop` onto the device or the mesh.

        On a mesh each device's shard is read and copied separately; devices with the
        same shard share one read. The threads of `pool` read the shards.
        """
        if self.sharding is None:
            layers = self.read_layers(start, stop)
            return jax.block_until_ready([jax.device_put(x) for x in layers])
        shape, sharding = self.shape[1:], self.sharding
        shards = distinct_shards(sharding, shape, sharding.addressable_devices)

        def put(shard: tuple[Block, list[Any]]) -> list[list[Array]]:
            block, devices = shard
            (layers,) = self.reader([(slice(start, stop), *block)])
            copies = [[jax.device_put(x, device) for device in devices] for x in layers]
            return jax.block_until_ready(copies)

        by_shard = list(pool.map(put, shards))
        # Of each layer, the shards on all devices.
        by_layer = [itertools.chain(*copies) for copies in zip(*by_shard, strict=True)]
        return [
            jax.make_array_from_single_device_arrays(shape, sharding, list(copies))
            for copies in by_layer
        ]

    def __getitem__(self, indices: tuple[np.ndarray, ...]) -> Shaped[np.ndarray, "n"]:
        """Reads single elements, given one array of indices per axis."""
        blocks = [
            tuple(slice(i, i + 1) for i in index)
            for index in np.stack(indices, axis=1).tolist()
        ]
        return np.concatenate([part.ravel() for part in self.reader(blocks)])


def read_slice(
    weights: Sequence[LayeredWeight], indices: Sequence[int], pool: Executor
) -> dict[int, Layer]:
    """Reads consecutive layers of some weights.

    Returns the layers by index, already on the device.
    """
    start, stop = min(indices), max(indices) + 1
    layers: dict[int, Layer] = {index: [] for index in indices}
    with jax.profiler.TraceAnnotation("read layer", index=start):
        for weight in weights:
            _return_memory()
            arrays = weight.put_layers(start, stop, pool)
            for index, layer in layers.items():
                layer.append(arrays[index - start])
            del arrays
        return layers


def _delete_layer(layer: Layer) -> None:
    """Deletes a layer from the device, even if Python still refers to it."""
    for array in layer:
        array.delete()
    _return_memory()


def _return_memory() -> None:
    """Returns the memory of earlier layers to the system.

    On a CPU an array keeps the memory that it was read into until Python collects
    garbage, of any generation; the C library then keeps the free memory until asked to
    return it.
    """
    gc.collect(0)
    return_freed_memory()


class LayerReader:
    """Brings layers to the device, reading the next one while one is computed.

    At most two slices of layers are on the device: each is deleted before the slice
    after the next is requested.

    Attributes:
      on_layer: called with each layer's index while its slice and the next one are on
        the device; for measurements.
      slices: how many slices a stack's layers are read in; None reads each layer
        separately.
    """

    def __init__(
        self,
        on_layer: Callable[[int], None] | None = None,
        slices: int | None = None,
    ):
        self.on_layer, self.slices = on_layer, slices

    def visit(
        self,
        weights: Sequence[LayeredWeight],
        order: Iterable[int],
        compute: Callable[[int, Layer], None],
    ) -> None:
        """Computes with one layer after another.

        Args:
          weights: weights to read for each layer.
          order: indices of the layers.
          compute: called with a layer's index and its weights; it must return only when
            the device has finished with them, and must not keep them.
        """
        indices = list(order)
        width = 1 if self.slices is None else max(1, -(-len(indices) // self.slices))
        groups = [indices[i : i + width] for i in range(0, len(indices), width)]
        with (
            ThreadPoolExecutor(1, "layers") as pool,
            ThreadPoolExecutor(thread_name_prefix="shards") as shards,
        ):
            # A future keeps its result alive, so it is dropped before the next read.
            pending = [pool.submit(read_slice, weights, groups[0], shards)]
            for group, following in zip(groups, [*groups[1:], None], strict=True):
                layers = pending.pop().result()
                if following is not None:
                    pending.append(pool.submit(read_slice, weights, following, shards))
                for index in group:
                    with jax.profiler.TraceAnnotation("compute layer", index=index):
                        compute(index, layers[index])
                    if self.on_layer is not None:
                        wait(pending)
                        self.on_layer(index)
                for layer in layers.values():
                    _delete_layer(layer)
