"""Weights that stay in their file, and layers that are read one ahead."""

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
from prompt_tuning.core.slices import whole

Layer = list[Array]


@dataclasses.dataclass(frozen=True)
class LayeredWeight:
    """A parameter of all blocks of a stack, of which nothing is in memory.

    Attributes:
      path: of the parameter.
      shape: that of all layers, `[L, ...]`.
      dtype: in the model; each layer is cast, or quantised, on its way in.
      reader: reads parts of it.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    reader: PartReader

    @property
    def size(self) -> int:
        """Numbers in all layers."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers, as the model has them."""
        return self.size * self.dtype.itemsize

    @property
    def abstract(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype, to trace with."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    @property
    def abstract_layer(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of one layer."""
        return jax.ShapeDtypeStruct(self.shape[1:], self.dtype)

    def read(self, index: int) -> Shaped[np.ndarray, "*layer"]:
        """One layer, in memory of its own.

        Raises:
          InputError: if the checkpoint is no longer what it was.
        """
        block = slice(index, index + 1), *whole(self.shape[1:])
        return self.reader([block])[0][0]

    def __getitem__(self, places: tuple[np.ndarray, ...]) -> Shaped[np.ndarray, "n"]:
        """Single numbers, by one array of indices for each axis; no layer is read."""
        blocks = [
            tuple(slice(i, i + 1) for i in place)
            for place in np.stack(places, axis=1).tolist()
        ]
        return np.concatenate([part.ravel() for part in self.reader(blocks)])


def read_layer(weights: Sequence[LayeredWeight], index: int) -> Layer:
    """One layer of some weights, on the device when this returns."""
    layer = []
    for weight in weights:
        _return_memory()
        layer.append(jax.device_put(weight.read(index)))
    return jax.block_until_ready(layer)


def _delete_layer(layer: Layer) -> None:
    """Takes a layer off the device, whatever else in Python still knows of it."""
    for array in layer:
        array.delete()
    _return_memory()


def _return_memory() -> None:
    """Gives memory back that held layers before.

    On a CPU an array is the memory that it was read into, of which JAX lets go when
    Python next collects garbage, of any age; what is then free the C library keeps
    until it is asked.
    """
    gc.collect(0)
    return_freed_memory()


class LayerReader:
    """Brings layers to the device, the next one while the last one is computed.

    Two layers are there at a time, never three: a layer is let go before the one after
    the next is asked for.

    Attributes:
      seen: called with each layer's number while it and the next are there; for
        measurements.
    """

    def __init__(self, on_layer: Callable[[int], None] | None = None):
        self.on_layer = on_layer

    def visit(
        self,
        weights: Sequence[LayeredWeight],
        order: Iterable[int],
        compute: Callable[[int, Layer], None],
    ) -> None:
        """Computes with one layer after the other.

        Args:
          weights: what is read of each layer.
          order: the layers' numbers.
          compute: is given a layer's number and its weights; returns when the device
            is done with them, and keeps none.
        """
        numbers = list(order)
        with ThreadPoolExecutor(1, "layers") as pool:
            # A future holds its result, so that it goes before the next one is read.
            ahead = [pool.submit(read_layer, weights, numbers[0])]
            for index, following in zip(numbers, [*numbers[1:], None], strict=True):
                layer = ahead.pop().result()
                if following is not None:
                    ahead.append(pool.submit(read_layer, weights, following))
                compute(index, layer)
                if self.on_layer is not None:
                    wait(ahead)
                    self.on_layer(index)
                _delete_layer(layer)
