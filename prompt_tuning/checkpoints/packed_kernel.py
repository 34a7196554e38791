"""Packs kernels into four bits while reading them."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Float, Float32, UInt8

from prompt_tuning.checkpoints.quantized_kernel import ScaledKernel
from prompt_tuning.checkpoints.stored_tensors import (
    Recipe,
    StoredTensor,
    by_source,
    empty,
    read_blocks,
)
from prompt_tuning.core.array_slices import Block, blocks_of, extent
from prompt_tuning.core.quantization.nibbles import NORMAL_FLOAT, pack

TILE_ROWS, TILE_COLUMNS = 512, 256
"""Weights that are packed at once, so that the steps of packing stay in the cache."""


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
                first = rows.start % half
                layer[...] = array[first : first + len(layer)]
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
        for row, column in _tiles(size_in, size_out):
            tile = weights[row : row + TILE_ROWS, column : column + TILE_COLUMNS]
            # The group depends on the whole kernel, not on the rows of this tile.
            with np.errstate(invalid="ignore"):  # the scales show it
                some_packed, some_scale = pack(tile, self.codebook, self._group)
            columns = slice(column, column + TILE_COLUMNS)
            packed[row // 2 :][: len(some_packed), columns] = some_packed
            scale[row // self._group :][: len(some_scale), columns] = some_scale
        return packed, scale


def _tiles(size_in: int, size_out: int) -> Iterator[tuple[int, int]]:
    """Yields the first row and column of each tile; its rows are whole groups."""
    for row in range(0, size_in, TILE_ROWS):
        for column in range(0, size_out, TILE_COLUMNS):
            yield row, column
