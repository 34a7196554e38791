"""Reads kernels in their stored codes, without rounding again."""

from collections.abc import Callable, Mapping, Sequence

import ml_dtypes
import numpy as np
from jaxtyping import Float32, Int16, Int32, Shaped, UInt8

from prompt_tuning.checkpoints.quantized.codes import Codes, WidenedTensor
from prompt_tuning.checkpoints.quantized.scaled_tensors import stretched
from prompt_tuning.checkpoints.stored_tensors import (
    FusedPart,
    Recipe,
    StoredTensor,
    Transpose,
    by_source,
    check_recipe,
    empty,
    read_blocks,
    tiles,
)
from prompt_tuning.core.array_slices import Block, blocks_of, extent, place_in_blocks
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.quantization.nibbles import MIDDLE
from prompt_tuning.core.quantization.stores import FLOAT8, INT8, Store

DTYPES = {INT8: np.dtype(np.int8), FLOAT8: np.dtype(ml_dtypes.float8_e4m3fn)}


class PublishedKernel:
    """Reads a kernel `[L, in, out]` and its scales, both by blocks."""

    def __init__(
        self,
        path: str,
        shape: tuple[int, ...],
        recipe: Recipe,
        stored: Mapping[str, StoredTensor],
        store: Store,
    ):
        check_recipe(path, shape, recipe, stored)
        self._path, self._recipe, self._store = path, recipe, store
        self._stored, self._size_in = stored, shape[-2]
        self._dtype = DTYPES.get(store.name, np.dtype(np.uint8))

    def read(self, parts: Sequence[Block]) -> list[np.ndarray]:
        """Reads blocks of the kernel, layer by layer."""
        results = [empty(extent(part), self._dtype) for part in parts]
        for name, layers in by_source(self._recipe, results, parts):
            values, transform = self._codes(name).values, self._recipe.transform
            if not self._store.packed:
                arrays = read_blocks(values, transform, [block for _, block in layers])
            else:
                arrays = self._read_packed(name, [block for _, block in layers])
            for (layer, _), array in zip(layers, arrays, strict=True):
                for tile in tiles(layer.shape):
                    layer[tile] = array[tile]
        return results

    def _read_packed(self, name: str, blocks: Sequence[Block]) -> list[np.ndarray]:
        size = self._store.group or self._size_in
        half, needed = size // 2, []
        for rows, columns in blocks:
            groups = blocks_of(rows, half)
            inputs = slice(groups.start * size, groups.stop * size)
            needed.append((inputs, columns))
        values = self._codes(name).values
        results = []
        unpacked = read_blocks(values, self._recipe.transform, needed)
        for (rows, _), codes in zip(blocks, unpacked, strict=True):
            results.append(_packed(codes, half)[place_in_blocks(rows, half)])
        return results

    def read_scales(
        self, parts: Sequence[Block]
    ) -> list[Shaped[np.ndarray, "*lead out"]]:
        """Reads blocks of the scales.

        Raises:
          InputError: if one is not finite.
        """

        def scales(name: str, codes: Codes, block: Block) -> np.ndarray:
            if self._store.nested is not None:
                assert codes.nested is not None
                return self._of_groups(codes.nested.values, block)
            return self._finite(name, codes, self._of_groups(codes.scales, block))

        return self._read_each(parts, self._store.scale_dtype, scales)

    def read_nested(
        self, parts: Sequence[Block]
    ) -> list[Float32[np.ndarray, "*lead out"]]:
        """Reads blocks of the scales' scales; see `read_scales` for errors."""

        def largest(name: str, codes: Codes, block: Block) -> np.ndarray:
            assert codes.nested is not None
            numbers = self._recipe.transform.read(codes.nested.largest, block)
            return self._finite(name, codes, numbers)

        return self._read_each(parts, np.float32, largest)

    def read_nested_codebooks(
        self, parts: Sequence[Block]
    ) -> list[Float32[np.ndarray, "*lead n"]]:
        """Returns each layer's table of scales; see `read_scales` for errors."""

        def table(name: str, codes: Codes, block: Block) -> np.ndarray:
            assert codes.nested is not None
            return self._finite(name, codes, codes.nested.table[block])

        return self._read_each(parts, np.float32, table)

    def read_zeros(
        self, parts: Sequence[Block]
    ) -> list[Int16[np.ndarray, "*lead out"]]:
        """Reads blocks of the zero points."""
        middle = MIDDLE if self._store.packed else 0

        def zeros(_: str, codes: Codes, block: Block) -> np.ndarray:
            if codes.zeros is None:
                return np.full(extent(block), middle, np.int16)
            return self._of_groups(codes.zeros, block)

        return self._read_each(parts, np.int16, zeros)

    def read_order(self, parts: Sequence[Block]) -> list[Int32[np.ndarray, "*lead n"]]:
        """Reads parts of the order of the inputs."""

        def order(_: str, codes: Codes, block: Block) -> np.ndarray:
            if codes.order is None:
                return np.arange(block[0].start, block[0].stop)
            return codes.order[block]

        return self._read_each(parts, np.int32, order)

    def read_codebooks(
        self, parts: Sequence[Block]
    ) -> list[Float32[np.ndarray, "*lead n"]]:
        """Returns the table of values for each layer."""

        def table(_: str, codes: Codes, block: Block) -> np.ndarray:
            assert codes.table is not None
            return codes.table[block]

        return self._read_each(parts, np.float32, table)

    def _read_each(
        self,
        parts: Sequence[Block],
        dtype: type | str,
        read: Callable[[str, Codes, Block], np.ndarray],
    ) -> list[np.ndarray]:
        results = [empty(extent(part), np.dtype(dtype)) for part in parts]
        for name, layers in by_source(self._recipe, results, parts):
            for layer, block in layers:
                layer[...] = read(name, self._codes(name), block)
        return results

    def _finite(self, name: str, codes: Codes, numbers: np.ndarray) -> np.ndarray:
        if not np.isfinite(numbers).all():
            raise InputError(
                f"{self._path}: the scales of {name} in {codes.scales.source} contain "
                "numbers that are not finite; is the checkpoint damaged?"
            )
        return numbers

    def _of_groups(self, tensor: StoredTensor, block: Block) -> np.ndarray:
        """Reads the numbers of the store's groups; without groups, of columns."""
        by_column = len(block) == 1
        groups, columns = (slice(0, 1), *block) if by_column else block
        count = 1 if self._store.group is None else self._size_in // self._store.group
        # Larger groups of this layer, each in several of the store's.
        ratio = count // tensor.shape[1]
        needed = (blocks_of(groups, ratio), columns)
        numbers = stretched(self._recipe.transform.read(tensor, needed), groups, ratio)
        return numbers[0] if by_column else numbers

    def _codes(self, name: str) -> Codes:
        codes = codes_of(self._stored[name])
        assert codes is not None
        return codes


def _packed(
    codes: UInt8[np.ndarray, "in out"], half: int
) -> UInt8[np.ndarray, "bytes out"]:
    """Packs the codes of both halves of each group of inputs into bytes."""
    size_in, size_out = codes.shape
    if codes.flags.c_contiguous:
        groups = codes.reshape(-1, 2, half, size_out)
        low, high = groups[:, 0], groups[:, 1]
        return (low | high << 4).reshape(size_in // 2, size_out)
    # A view of [out, in], as most layouts are, which is transposed when it is copied.
    groups = np.ascontiguousarray(codes.T).reshape(-1, 2, half)
    low, high = groups[:, 0], groups[:, 1]
    return (low | high << 4).reshape(size_out, size_in // 2).T


def codes_of(tensor: StoredTensor) -> Codes | None:
    """Returns the codes that are stored for a tensor, if a store can hold them."""
    return tensor.codes if isinstance(tensor, WidenedTensor) else None


def keeps_inputs(recipe: Recipe) -> bool:
    """Tests whether a recipe stacks kernels and keeps the order of their inputs."""
    transform = recipe.transform
    turned = isinstance(transform, Transpose) or (
        isinstance(transform, FusedPart) and not transform.in_first
    )
    return recipe.stacked and turned
