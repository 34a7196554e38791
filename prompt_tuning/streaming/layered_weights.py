"""Weights that stay in their file, and a reader that prefetches one layer."""

import dataclasses
import gc
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import jax
import numpy as np
from jaxtyping import Array, Shaped

from prompt_tuning.checkpoints.stored_tensors import PartReader
from prompt_tuning.core.compiled_step import return_freed_memory
from prompt_tuning.core.slices import Block, whole

Layer = list[Array]


@dataclasses.dataclass(frozen=True)
class LayeredWeight:
    """A parameter of all blocks of a stack, none of which is on the device.

    Attributes:
      path: path of the parameter.
      shape: shape of all layers, `[L, ...]`.
      dtype: dtype in the model; each layer is cast, or quantized, as it is read.
      reader: reads slices of the parameter.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    reader: PartReader

    @classmethod
    def from_array(cls, path: str, array: np.ndarray) -> "LayeredWeight":
        """Returns a parameter that is in host memory, where it may change."""

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
        """Shape and dtype of one layer."""
        return jax.ShapeDtypeStruct(self.shape[1:], self.dtype)

    def read(self, index: int) -> Shaped[np.ndarray, "*layer"]:
        """Reads one layer into newly allocated memory.

        Raises:
          InputError: if the checkpoint has changed since it was opened.
        """
        block = slice(index, index + 1), *whole(self.shape[1:])
        return self.reader([block])[0][0]

    def __getitem__(self, indices: tuple[np.ndarray, ...]) -> Shaped[np.ndarray, "n"]:
        """Reads single elements, given one array of indices per axis."""
        blocks = [
            tuple(slice(i, i + 1) for i in index)
            for index in np.stack(indices, axis=1).tolist()
        ]
        return np.concatenate([part.ravel() for part in self.reader(blocks)])


def read_layer(weights: Sequence[LayeredWeight], index: int) -> Layer:
    """Reads one layer of some weights; it is on the device when this returns."""
    layer = []
    with jax.profiler.TraceAnnotation("read layer", index=index):
        for weight in weights:
            _return_memory()
            layer.append(jax.device_put(weight.read(index)))
        return jax.block_until_ready(layer)


def _delete_layer(layer: Layer) -> None:
    """Deletes a layer from the device, whatever else in Python refers to it."""
    for array in layer:
        array.delete()
    _return_memory()


def _return_memory() -> None:
    """Returns memory that held earlier layers.

    On a CPU an array keeps the memory that it was read into until Python collects
    garbage, of any generation; the C library then keeps the free memory until it is
    asked to return it.
    """
    gc.collect(0)
    return_freed_memory()


class LayerReader:
    """Brings layers to the device, reading the next one while one is computed.

    At most two layers are on the device: a layer is deleted before the layer after the
    next is requested.

    Attributes:
      on_layer: called with each layer's index while that layer and the next one are on
        the device; for measurements.
    """

    def __init__(self, on_layer: Callable[[int], None] | None = None):
        self.on_layer = on_layer

    def visit(
        self,
        weights: Sequence[LayeredWeight],
        order: Iterable[int],
        compute: Callable[[int, Layer], None],
    ) -> None:
        """Computes with one layer after another.

        Args:
          weights: weights to read of each layer.
          order: indices of the layers.
          compute: called with a layer's index and its weights; it returns when the
            device has finished with them, and must not keep them.
        """
        indices = list(order)
        with ThreadPoolExecutor(1, "layers") as pool:
            # A future keeps its result alive, so it is dropped before the next read.
            pending = [pool.submit(read_layer, weights, indices[0])]
            for index, following in zip(indices, [*indices[1:], None], strict=True):
                layer = pending.pop().result()
                if following is not None:
                    pending.append(pool.submit(read_layer, weights, following))
                with jax.profiler.TraceAnnotation("compute layer", index=index):
                    compute(index, layer)
                if self.on_layer is not None:
                    wait(pending)
                    self.on_layer(index)
                _delete_layer(layer)
