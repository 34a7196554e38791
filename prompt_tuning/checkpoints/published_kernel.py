"""Kernels that keep their published codes: their stores, and how they are read.

Nothing is rounded again.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Shaped, UInt8

from prompt_tuning.checkpoints.quantized.codes import Codes, WidenedTensor
from prompt_tuning.checkpoints.quantized.scaled_tensors import stretched
from prompt_tuning.checkpoints.special_layouts import experts_apart
from prompt_tuning.checkpoints.stored_tensors import (
    FusedPart,
    Recipe,
    StoredTensor,
    Transpose,
    by_source,
    check_recipe,
    empty,
    identity,
    read_blocks,
    tiles,
)
from prompt_tuning.core.array_slices import Block, blocks_of, extent, place_in_blocks
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.quantization.nibbles import MIDDLE
from prompt_tuning.core.quantization.stores import (
    FLOAT8,
    INT8,
    SMALLEST_GROUP,
    TABLES,
    UNQUANTIZED,
    Part,
    Store,
    is_kernel,
)

KERNEL = "/kernel"
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

    def read_part(
        self, part: Part, parts: Sequence[Block]
    ) -> list[Shaped[np.ndarray, "..."]]:
        """Reads blocks of an array next to the kernel; see `quantization.stores`.

        Raises:
          InputError: if a scale is not finite.
        """
        dtypes = {"scale": self._store.scale_dtype, "zero": "int16", "order": "int32"}
        dtype = np.dtype(dtypes.get(part, "float32"))
        results = [empty(extent(block), dtype) for block in parts]
        for name, layers in by_source(self._recipe, results, parts):
            for layer, block in layers:
                layer[...] = self._part_of_layer(part, name, block)
        return results

    def _part_of_layer(self, part: Part, name: str, block: Block) -> np.ndarray:
        codes = self._codes(name)
        nested = codes.nested
        if part == "zero":
            if codes.zeros is not None:
                return self._of_groups(codes.zeros, block)
            return np.full(extent(block), MIDDLE if self._store.packed else 0)
        if part == "order":
            order = np.arange(self._size_in) if codes.order is None else codes.order
            return order[block]
        if part == "codebook":
            assert codes.table is not None
            return codes.table[block]
        if part == "scale" and self._store.nested is None:
            return self._finite(name, codes, self._of_groups(codes.scales, block))
        assert nested is not None
        if part == "scale":
            return self._of_groups(nested.values, block)
        if part == "nested_codebook":
            return self._finite(name, codes, nested.table[block])
        largest = self._recipe.transform.read(nested.largest, block)
        return self._finite(name, codes, largest)

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


def is_quantized(stored: Mapping[str, StoredTensor]) -> bool:
    """Tests whether any tensor of a checkpoint is quantized."""
    return any(isinstance(tensor, WidenedTensor) for tensor in stored.values())


def published_stores(
    recipes: Mapping[str, Recipe], stored: Mapping[str, StoredTensor]
) -> dict[str, Store]:
    """Returns the store that holds each parameter exactly as published.

    Kernels keep their codes, and unquantized parameters their dtype. Quantized
    parameters without such a store become bfloat16, e.g. if groups differ in size, or
    only some layers or experts of a stack are quantized.
    """
    stores = {}
    for path, recipe in recipes.items():
        tensors = [stored[name] for name in recipe.sources if name in stored]
        if tensors:
            store = _of_table(recipe, stored) if path in TABLES else None
            if is_kernel(path) and path not in TABLES:
                store = _of_kernel(path, recipe, stored)
            stores[path] = store or Store(_widest(tensors))
    return stores


def _of_kernel(
    path: str, recipe: Recipe, stored: Mapping[str, StoredTensor]
) -> Store | None:
    apart, tensors = experts_apart(path, recipe, stored)
    return _common(list(tensors.values())) if keeps_inputs(apart) else None


def _of_table(recipe: Recipe, stored: Mapping[str, StoredTensor]) -> Store | None:
    """Returns the store of a published table, which is the transpose of a kernel."""
    if recipe.stacked or recipe.transform is not identity:
        return None
    store = _common([stored[name] for name in recipe.sources])
    if store is None or store.ordered:
        return None
    return dataclasses.replace(store, nested=None)


def _common(tensors: Sequence[StoredTensor]) -> Store | None:
    """Returns the store for the codes of all layers; None if there is none."""
    codes = [codes_of(tensor) for tensor in tensors]
    present = [held for held in codes if held is not None]
    names = {held.store.name for held in present}
    sizes = {held.values.shape[1] for held in present}
    if len(present) < len(codes) or len(names) > 1 or len(sizes) > 1:
        return None
    groups = {held.store.group for held in present}
    zeros = any(held.zeros is not None for held in present)
    (size_in,) = sizes
    ordered = any(held.order is not None for held in present)
    sizes_of_nested = {held.store.nested for held in present}
    alike = len(groups) == len(sizes_of_nested) == 1
    nested = sizes_of_nested.pop() if alike else None
    (name,) = names
    if groups == {None} and not zeros:
        return Store(name)
    # A larger group is several of the smaller ones with the same scale.
    group = math.gcd(*(group or size_in for group in groups))
    return (
        None
        if group < min(SMALLEST_GROUP, size_in)
        else Store(name, group, zeros, ordered, nested)
    )


def _widest(tensors: Sequence[StoredTensor]) -> str:
    if any(isinstance(tensor, WidenedTensor) for tensor in tensors):
        return UNQUANTIZED
    dtypes = {tensor.dtype for tensor in tensors}
    # Unlike NumPy's, this knows a type for bfloat16 next to float16.
    widest = functools.reduce(jnp.promote_types, dtypes)
    return "float32" if widest.name == "float64" else widest.name
