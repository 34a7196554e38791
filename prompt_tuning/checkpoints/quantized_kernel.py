"""Quantizes kernels to eight or four bits while reading them."""

import abc
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Float32, Int8, UInt8

from prompt_tuning.checkpoints.stored_tensors import (
    Recipe,
    StoredTensor,
    by_source,
    check_recipe,
    empty,
    read_blocks,
    tiles,
)
from prompt_tuning.core.array_slices import Block, blocks_of, extent, place_in_blocks
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.quantization.channels import channel_scale, quantize
from prompt_tuning.core.quantization.nibbles import NORMAL_FLOAT, pack

TILE_ROWS, TILE_COLUMNS = 512, 256
"""Weights that are packed at once, so that the steps of packing stay in the cache."""

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
        self._rows = slice(0, shape[-2])
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


class PackedKernel(ScaledKernel):
    """Reads a kernel with two weights per byte, `[L, in / 2, out]`.

    A scale depends only on the weights of its group of `group` inputs, so each process
    reads only the groups that it keeps. With `codebook`, weights are rounded to the
    values of NF4.
    """

    def __init__(
        self,
        path: str,
        shape: tuple[int, ...],
        recipe: Recipe,
        stored: Mapping[str, StoredTensor],
        *,
        codebook: bool,
        group: int,
    ):
        super().__init__(path, shape, recipe, stored)
        self._group = group
        self.codebook = NORMAL_FLOAT if codebook else None

    def read(self, parts: Sequence[Block]) -> list[UInt8[np.ndarray, "*lead half out"]]:
        """Reads blocks of the packed kernel, layer by layer."""
        results = [empty(extent(part), np.dtype(np.uint8)) for part in parts]
        half = self._group // 2
        for name, layers in by_source(self._recipe, results, parts):
            blocks: list[Block] = [
                (blocks_of(rows, half), columns) for _, (rows, columns) in layers
            ]
            packed = self._pack(name, blocks)
            for (layer, (rows, _)), array in zip(layers, packed, strict=True):
                layer[...] = array[place_in_blocks(rows, half)]
        return results

    def _read_scales(self, name: str, block: Block) -> None:
        self._pack(name, [block])

    def read_codebooks(
        self, parts: Sequence[Block]
    ) -> list[Float32[np.ndarray, "*lead n"]]:
        """Returns the table of values for each layer."""
        assert self.codebook is not None
        tables = [self.codebook[part[-1]] for part in parts]
        return [
            np.tile(table, (*extent(part[:-1]), 1))
            for part, table in zip(parts, tables, strict=True)
        ]

    def _pack(
        self, name: str, blocks: Sequence[Block]
    ) -> list[UInt8[np.ndarray, "half out"]]:
        """Packs blocks of groups and columns of a stored array; keeps their scales."""
        size = self._group
        needed: list[Block] = [
            (slice(groups.start * size, groups.stop * size), columns)
            for groups, columns in blocks
        ]
        unpacked = read_blocks(self._stored[name], self._recipe.transform, needed)
        results = []
        for block, weights in zip(blocks, unpacked, strict=True):
            packed, scale = self._pack_tiles(weights)
            self._keep(name, block, scale)
            results.append(packed)
        return results

    def _pack_tiles(
        self, weights: Float[np.ndarray, "in out"]
    ) -> tuple[UInt8[np.ndarray, "half out"], Float32[np.ndarray, "groups out"]]:
        size_in, size_out = weights.shape
        packed = np.empty((size_in // 2, size_out), np.uint8)
        scale = np.empty((size_in // self._group, size_out), np.float32)
        rows, columns = range(0, size_in, TILE_ROWS), range(0, size_out, TILE_COLUMNS)
        for row, column in itertools.product(rows, columns):
            tile = weights[row : row + TILE_ROWS, column : column + TILE_COLUMNS]
            # The group depends on the whole kernel, not on the rows of this tile.
            with np.errstate(invalid="ignore"):  # the scales show it
                some_packed, some_scale = pack(tile, self.codebook, self._group)
            part = slice(column, column + TILE_COLUMNS)
            packed[row // 2 :][: len(some_packed), part] = some_packed
            scale[row // self._group :][: len(some_scale), part] = some_scale
        return packed, scale
