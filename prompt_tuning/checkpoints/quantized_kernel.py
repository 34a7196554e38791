"""Quantizes kernels to int8 while reading them."""

import abc
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Float32, Int8

from prompt_tuning.checkpoints.stored_tensors import (
    Recipe,
    StoredTensor,
    by_source,
    check_recipe,
    empty,
    read_blocks,
    tiles,
)
from prompt_tuning.core.array_slices import Block, extent
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.quantization.channels import channel_scale, quantize

Bounds = tuple[tuple[int, int], ...]
"""First index of a block along each axis, and the index after its last."""


class ScaledKernel(abc.ABC):
    """Reads a kernel `[L, in, out]` as integers with scales, both by blocks."""

    def __init__(
        self,
        path: str,
        shape: tuple[int, ...],
        recipe: Recipe,
        stored: Mapping[str, StoredTensor],
    ):
        check_recipe(path, shape, recipe, stored)
        self._path, self._recipe, self._stored = path, recipe, stored
        self._scales: dict[tuple[str, Bounds], np.ndarray] = {}

    @abc.abstractmethod
    def read(self, parts: Sequence[Block]) -> list[np.ndarray]:
        """Reads blocks of the integers, layer by layer, and keeps their scales.

        Raises:
          InputError: for weights that are not finite.
        """

    @abc.abstractmethod
    def _read_scales(self, name: str, block: Block) -> None:
        """Computes scales from a block of a stored array's weights, and keeps them."""

    def read_scales(
        self, parts: Sequence[Block]
    ) -> list[Float32[np.ndarray, "*lead out"]]:
        """Returns the scales, reading only weights that `read` has not read before.

        Raises:
          InputError: for weights that are not finite.
        """
        results = [empty(extent(part), np.dtype(np.float32)) for part in parts]
        for name, layers in by_source(self._recipe, results, parts):
            for layer, block in layers:
                if (name, _bounds(block)) not in self._scales:
                    self._read_scales(name, block)
                layer[...] = self._kept(name, block)
        return results

    def _keep(
        self, name: str, block: Block, scale: Float32[np.ndarray, "*lead out"]
    ) -> None:
        """Keeps scales, which reveal any weight that is not finite."""
        if not np.isfinite(scale).all():
            raise InputError(
                f"{self._path}: {name} in {self._stored[name].source} contains "
                "numbers that are not finite and cannot be quantized; is the "
                "checkpoint damaged?"
            )
        self._scales[name, _bounds(block)] = scale

    def _kept(self, name: str, block: Block) -> Float32[np.ndarray, "*lead out"]:
        return self._scales[name, _bounds(block)]


def _bounds(block: Block) -> Bounds:
    return tuple((axis.start, axis.stop) for axis in block)


class QuantizedKernel(ScaledKernel):
    """Reads a kernel as int8, with a scale for each output channel.

    A channel's scale depends on its largest weight. If the rows of a kernel are
    sharded, each process also reads the other rows to compute the scales: the only case
    in which a process reads more of a checkpoint than it keeps.
    """

    def __init__(
        self,
        path: str,
        shape: tuple[int, ...],
        recipe: Recipe,
        stored: Mapping[str, StoredTensor],
    ):
        super().__init__(path, shape, recipe, stored)
        self._rows = slice(0, shape[-2])

    def read(self, parts: Sequence[Block]) -> list[Int8[np.ndarray, "*lead in out"]]:
        """Reads blocks of the kernel, layer by layer."""
        results = [empty(extent(part), np.dtype(np.int8)) for part in parts]
        for name, layers in by_source(self._recipe, results, parts):
            weights = self._read_columns(name, [columns for _, (_, columns) in layers])
            for layer, (rows, columns) in layers:
                block = weights[columns.start, columns.stop][rows]
                scale = self._kept(name, (columns,))
                for tile in tiles(block.shape):
                    layer[tile] = quantize(block[tile], scale[tile[-1]])
        return results

    def _read_scales(self, name: str, block: Block) -> None:
        self._read_columns(name, block)

    def _read_columns(
        self, name: str, columns: Sequence[slice]
    ) -> dict[tuple[int, int], Float[np.ndarray, "in _"]]:
        """Reads complete columns of a stored array and keeps their scales.

        Returns the weights by `(start, stop)` of the columns.
        """
        distinct = {(part.start, part.stop): part for part in columns}
        blocks: list[Block] = [(self._rows, part) for part in distinct.values()]
        arrays = read_blocks(self._stored[name], self._recipe.transform, blocks)
        columns_read = dict(zip(distinct, arrays, strict=True))
        for bounds, weights in columns_read.items():
            self._keep(name, (distinct[bounds],), np.asarray(channel_scale(weights)))
        return columns_read
