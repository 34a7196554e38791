"""Kernels that are quantised as they are read."""

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
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.quantization import channel_scale, quantize
from prompt_tuning.core.slices import Block, extent


class QuantizedKernel:
    """A kernel `[L, in, out]` in int8, and the scale of each of its output channels.

    A channel's scale is that of its largest weight. Where the rows of a kernel are
    split, whoever has some of them reads the others too, for the scales alone: this is
    the one case in which more is read of a checkpoint than is kept.
    """

    def __init__(
        self,
        path: str,
        shape: tuple[int, ...],
        recipe: Recipe,
        stored: Mapping[str, StoredTensor],
    ):
        """Reads nothing yet; arguments as for `assemble`.

        Raises:
          InputError: as `check_recipe` does.
        """
        check_recipe(path, shape, recipe, stored)
        self._path, self._recipe, self._stored = path, recipe, stored
        self._rows = slice(0, shape[-2])
        self._scales: dict[tuple[str, int, int], np.ndarray] = {}

    def read(self, parts: Sequence[Block]) -> list[Int8[np.ndarray, "*lead in out"]]:
        """Reads some parts of the kernel, layer by layer.

        Raises:
          InputError: for weights that are not finite.
        """
        results = [empty(extent(part), np.dtype(np.int8)) for part in parts]
        for name, layers in by_source(self._recipe, results, parts):
            weights = self._read_columns(name, [columns for _, (_, columns) in layers])
            for layer, (rows, columns) in layers:
                own = weights[columns.start, columns.stop][rows]
                scale = self._scales[name, columns.start, columns.stop]
                for tile in tiles(own.shape):
                    layer[tile] = quantize(own[tile], scale[tile[-1]])
        return results

    def read_scales(
        self, parts: Sequence[Block]
    ) -> list[Float32[np.ndarray, "*lead out"]]:
        """The scales; those of channels that `read` has met are not read again.

        Raises:
          InputError: for weights that are not finite.
        """
        results = [empty(extent(part), np.dtype(np.float32)) for part in parts]
        for name, layers in by_source(self._recipe, results, parts):
            for layer, (columns,) in layers:
                place = name, columns.start, columns.stop
                if place not in self._scales:
                    self._read_columns(name, [columns])
                layer[...] = self._scales[place]
        return results

    def _read_columns(
        self, name: str, columns: Sequence[slice]
    ) -> dict[tuple[int, int], Float[np.ndarray, "in _"]]:
        """Whole columns of a stored array, by first and last; their scales are kept."""
        distinct = {(part.start, part.stop): part for part in columns}
        blocks: list[Block] = [(self._rows, part) for part in distinct.values()]
        read = read_blocks(self._stored[name], self._recipe.transform, blocks)
        found = dict(zip(distinct, read, strict=True))
        for place, weights in found.items():
            scale = np.asarray(channel_scale(weights))
            if not np.isfinite(scale).all():
                raise InputError(
                    f"{self._path}: {name} in {self._stored[name].source} holds "
                    "numbers that are not finite, and cannot be quantised; is the "
                    "checkpoint damaged?"
                )
            self._scales[name, *place] = scale
        return found
