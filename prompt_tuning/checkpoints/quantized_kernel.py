"""Quantizes kernels to int8 while reading them."""

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


class QuantizedKernel:
    """Reads a kernel `[L, in, out]` as int8, with a scale for each output channel.

    The scale of a channel depends on its largest weight. If the rows of a kernel are
    sharded, each process also reads the rows of the others to compute the scales: only
    then does a process read more of a checkpoint than it keeps.
    """

    def __init__(
        self,
        path: str,
        shape: tuple[int, ...],
        recipe: Recipe,
        stored: Mapping[str, StoredTensor],
    ):
        """Prepares reading, without reading anything yet.

        Raises:
          InputError: as `check_recipe` does.
        """
        check_recipe(path, shape, recipe, stored)
        self._path, self._recipe, self._stored = path, recipe, stored
        self._rows = slice(0, shape[-2])
        self._scales: dict[tuple[str, int, int], np.ndarray] = {}

    def read(self, parts: Sequence[Block]) -> list[Int8[np.ndarray, "*lead in out"]]:
        """Reads blocks of the kernel, layer by layer.

        Raises:
          InputError: for weights that are not finite.
        """
        results = [empty(extent(part), np.dtype(np.int8)) for part in parts]
        for name, layers in by_source(self._recipe, results, parts):
            weights = self._read_columns(name, [columns for _, (_, columns) in layers])
            for layer, (rows, columns) in layers:
                block = weights[columns.start, columns.stop][rows]
                scale = self._scales[name, columns.start, columns.stop]
                for tile in tiles(block.shape):
                    layer[tile] = quantize(block[tile], scale[tile[-1]])
        return results

    def read_scales(
        self, parts: Sequence[Block]
    ) -> list[Float32[np.ndarray, "*lead out"]]:
        """Returns the scales, reading only channels that `read` has not read before.

        Raises:
          InputError: for weights that are not finite.
        """
        results = [empty(extent(part), np.dtype(np.float32)) for part in parts]
        for name, layers in by_source(self._recipe, results, parts):
            for layer, (columns,) in layers:
                key = name, columns.start, columns.stop
                if key not in self._scales:
                    self._read_columns(name, [columns])
                layer[...] = self._scales[key]
        return results

    def _read_columns(
        self, name: str, columns: Sequence[slice]
    ) -> dict[tuple[int, int], Float[np.ndarray, "in _"]]:
        """Reads complete columns of a stored array and keeps their scales.

        Returns:
          The weights by `(start, stop)` of the columns.
        """
        distinct = {(part.start, part.stop): part for part in columns}
        blocks: list[Block] = [(self._rows, part) for part in distinct.values()]
        read = read_blocks(self._stored[name], self._recipe.transform, blocks)
        columns_read = dict(zip(distinct, read, strict=True))
        for bounds, weights in columns_read.items():
            scale = np.asarray(channel_scale(weights))
            check_finite(self._path, name, self._stored[name], scale)
            self._scales[name, *bounds] = scale
        return columns_read


def check_finite(
    path: str, name: str, tensor: StoredTensor, scale: Float32[np.ndarray, "..."]
) -> None:
    """Checks the scales of a kernel, which show any weight that is not finite.

    Raises:
      InputError: if one is not finite.
    """
    if not np.isfinite(scale).all():
        raise InputError(
            f"{path}: {name} in {tensor.source} contains numbers that are not finite "
            "and cannot be quantized; is the checkpoint damaged?"
        )
