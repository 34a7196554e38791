"""Chooses how to read the arrays of each parameter."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.typing import DTypeLike

from prompt_tuning.checkpoints.published_kernel import PublishedKernel
from prompt_tuning.checkpoints.quantized_kernel import PackedKernel, QuantizedKernel
from prompt_tuning.checkpoints.special_layouts import experts_apart
from prompt_tuning.checkpoints.stored_tensors import (
    PartReader,
    Recipe,
    StoredTensor,
    Transform,
    assemble_parts,
    empty,
    tiles,
)
from prompt_tuning.core.array_slices import Block
from prompt_tuning.core.quantization import stores

Abstract = Mapping[str, jax.ShapeDtypeStruct]
Readers = Iterator[tuple[str, PartReader]]


@dataclasses.dataclass(frozen=True)
class _Turned(Transform):
    """Reverses the axes of another transform's result."""

    first: Transform

    def __call__(self, stored: np.ndarray) -> np.ndarray:
        return self.first(stored).T

    def read(self, tensor: StoredTensor, block: Block) -> np.ndarray:
        return self.first.read(tensor, block[::-1]).T


def published_readers(
    path: str,
    abstract: Abstract,
    recipe: Recipe,
    stored: Mapping[str, StoredTensor],
    store: stores.Store,
) -> Readers:
    """Yields readers of a kernel that keeps its published codes, and its scales etc."""
    shape, recipe, turned = _oriented(path, abstract, recipe)
    recipe, stored = experts_apart(path, recipe, stored)
    kernel = PublishedKernel(path, shape, recipe, stored, store)
    yield path, turned(kernel.read)
    for part in stores.PARTS:
        if (part_path := stores.part_path(path, part)) in abstract:
            read = functools.partial(kernel.read_part, part)
            yield part_path, read if part.startswith("nested") else turned(read)


def _oriented(
    path: str, abstract: Abstract, recipe: Recipe
) -> tuple[tuple[int, ...], Recipe, Callable[[PartReader], PartReader]]:
    """Returns how to read a quantized parameter as a kernel `[..., in, out]`.

    Returns:
      the shape of the kernel, its recipe, and a function that turns a reader of the
        kernel into one of the parameter: a table is the kernel's transpose.
    """
    shape = stores.weight_shape(path, abstract[path])
    if path not in stores.TABLES:
        return shape, recipe, lambda read: read

    def turned(read: PartReader) -> PartReader:
        def read_turned(parts: Sequence[Block]) -> list[np.ndarray]:
            return [_aligned(x.T) for x in read([part[::-1] for part in parts])]

        return read_turned

    recipe = dataclasses.replace(recipe, transform=_Turned(recipe.transform))
    return shape[::-1], recipe, turned


def readers(
    path: str,
    abstract: Abstract,
    recipe: Recipe,
    stored: Mapping[str, StoredTensor],
    dtype: DTypeLike | None,
) -> Readers:
    """Yields the reader of a parameter, and of its scales if it is quantized.

    `dtype` is that of unquantized parameters; None for the leaf's.
    """
    leaf = abstract[path]
    if not stores.is_quantized(leaf):
        cast_to = np.dtype(leaf.dtype if dtype is None else dtype)
        yield (
            path,
            functools.partial(
                assemble_parts, path, tuple(leaf.shape), cast_to, recipe, stored
            ),
        )
        return
    shape, recipe, turned = _oriented(path, abstract, recipe)
    recipe, stored = experts_apart(path, recipe, stored)
    if stores.is_packed(leaf):
        codebook = stores.part_path(path, "codebook")
        groups = abstract[stores.part_path(path, "scale")].shape[
            -1 if path in stores.TABLES else -2
        ]
        packed = PackedKernel(
            path,
            shape,
            recipe,
            stored,
            codebook=codebook in abstract,
            group=shape[-2] // groups,
        )
        yield path, turned(packed.read)
        yield stores.part_path(path, "scale"), turned(packed.read_scales)
        if packed.codebook is not None:
            yield codebook, turned(packed.read_codebooks)
    else:
        kernel = QuantizedKernel(path, shape, recipe, stored)
        yield path, turned(kernel.read)
        yield stores.part_path(path, "scale"), turned(kernel.read_scales)


def _aligned(array: np.ndarray) -> np.ndarray:
    """Copies an array, tile by tile, to memory that JAX uses without a copy."""
    copy = empty(array.shape, array.dtype)
    for tile in tiles(array.shape):
        copy[tile] = array[tile]
    return copy
