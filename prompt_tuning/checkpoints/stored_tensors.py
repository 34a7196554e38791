"""Stored tensors, and recipes that make our parameters from them.

A format provides `dict[name, StoredTensor]` and a model family `dict[path, Recipe]`;
the functions here combine them without knowing either.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from prompt_tuning.core.array_slices import Block, extent, joined, relative, whole
from prompt_tuning.core.errors import InputError

PartReader = Callable[[Sequence[Block]], list[np.ndarray]]
"""Reads blocks of one parameter, and nothing else of it."""

FLOATING = ("float64", "float32", "bfloat16", "float16")
ALIGNMENT = 64
TILE = 128


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One array of a checkpoint, read on request.

    Attributes:
      shape: shape of the array.
      dtype: dtype in the file; bfloat16 is `ml_dtypes.bfloat16`.
      source: file that contains the array, or its folder if it has a separate one.
      read_block: reads a block of the array, possibly as a view of the file.
      pieces: shape of the chunks that can only be decompressed as a whole; None if any
        number can be read individually.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    source: str
    read_block: Callable[[Block], np.ndarray]
    pieces: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Uncompressed size in bytes."""
        return self.size * self.dtype.itemsize

    def read(self, block: Block | None = None) -> np.ndarray:
        """Reads a block of the array, or all of it."""
        return np.asarray(
            self.read_block(whole(self.shape) if block is None else block)
        )


class Transform(abc.ABC):
    """A rearrangement of a stored array."""

    @abc.abstractmethod
    def __call__(self, stored: np.ndarray) -> np.ndarray:
        """Transforms a complete array; returns a view where possible."""

    @abc.abstractmethod
    def read(self, tensor: StoredTensor, block: Block) -> np.ndarray:
        """Reads a block of the transformed array, and no more of the stored one."""


class Identity(Transform):
    """Leaves the array as it is stored."""

    def __call__(self, stored: np.ndarray) -> np.ndarray:
        """Returns the array."""
        return stored

    def read(self, tensor: StoredTensor, block: Block) -> np.ndarray:
        """Reads the same block."""
        return tensor.read(block)


class Transpose(Transform):
    """Reverses the axes of the array: `[out, in]` to `[in, out]`."""

    def __call__(self, stored: np.ndarray) -> np.ndarray:
        """Reverses the axes."""
        return stored.T

    def read(self, tensor: StoredTensor, block: Block) -> np.ndarray:
        """Reads the transposed block."""
        return tensor.read(block[::-1]).T


class Flattened(Transform):
    """Joins all axes of a small array."""

    def __call__(self, stored: np.ndarray) -> np.ndarray:
        """Returns the elements in order."""
        return stored.reshape(-1)

    def read(self, tensor: StoredTensor, block: Block) -> np.ndarray:
        """Reads the whole array, and returns the block."""
        return tensor.read().reshape(-1)[block]


identity = Identity()
transpose = Transpose()
flattened = Flattened()


@dataclasses.dataclass(frozen=True)
class RowsFrom(Transform):
    """Skips the first rows of a table.

    Attributes:
      first: number of skipped rows.
    """

    first: int

    def __call__(self, stored: np.ndarray) -> np.ndarray:
        """Returns the remaining rows."""
        return stored[self.first :]

    def read(self, tensor: StoredTensor, block: Block) -> np.ndarray:
        """Reads the block at its offset in the stored table."""
        rows, *columns = block
        stored = slice(rows.start + self.first, rows.stop + self.first)
        return tensor.read((stored, *columns))


@dataclasses.dataclass(frozen=True)
class FusedPart(Transform):
    """Takes the columns of one of the projections that are stored as one.

    The columns are stored in equal groups, each with the columns of all parts one after
    the other: with one group the parts are contiguous; GPT-NeoX has a group for each
    head.

    Attributes:
      index: index of the part.
      shares: relative sizes of the parts.
      groups: number of groups.
      in_first: whether arrays are stored `[in, out]` instead of `[out, in]`.
    """

    index: int = 0
    shares: tuple[int, ...] = (1,)
    groups: int = 1
    in_first: bool = True

    def __call__(self, stored: np.ndarray) -> np.ndarray:
        """Returns the part, of shape `[..., columns]`.

        Raises:
          ValueError: if the number of columns is not divisible.
        """
        whole = self._oriented(stored)
        grouped = whole.reshape(*whole.shape[:-1], self.groups, -1)
        first, last = self._bounds(grouped.shape[-1])
        return grouped[..., first:last].reshape(*whole.shape[:-1], -1)

    def columns(self, count: int) -> np.ndarray:
        """Returns the indices of the part among `count` fused columns."""
        return FusedPart(self.index, self.shares, self.groups)(np.arange(count))

    def read(self, tensor: StoredTensor, block: Block) -> np.ndarray:
        """Reads the groups that the block needs, and returns it."""
        *leading, last = block
        total = tensor.shape[-1 if self.in_first else 0]
        size = total // self.groups
        first, stop = self._bounds(size)
        width = stop - first
        start, end = last.start // width, -(-last.stop // width)
        stored = slice(start * size, end * size)
        if self.groups == 1:  # nothing but the block
            stored = slice(first + last.start, first + last.stop)
        needed = (*leading, stored) if self.in_first else (stored, *leading[::-1])
        array = self._oriented(tensor.read(needed))
        if self.groups == 1:
            return array
        grouped = array.reshape(*array.shape[:-1], end - start, size)[..., first:stop]
        flat = grouped.reshape(*array.shape[:-1], -1)
        return flat[..., last.start - start * width : last.stop - start * width]

    def _oriented(self, stored: np.ndarray) -> np.ndarray:
        return stored if self.in_first else stored.T

    def _bounds(self, size: int) -> tuple[int, int]:
        """Returns the range of the part within a group of `size` columns."""
        unit, rest = divmod(size, sum(self.shares))
        if rest:
            raise ValueError(f"{size} columns are not in the ratio {self.shares}")
        preceding = sum(self.shares[: self.index])
        return unit * preceding, unit * (preceding + self.shares[self.index])


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How one parameter is made from stored arrays.

    Attributes:
      sources: names of the stored arrays: one, or one per layer.
      stacked: whether they are stacked on a leading axis `L`.
      transform: transform applied to each stored array.
      experts: number of arrays per layer, stacked on a second axis; None if each layer
        has one array.
    """

    sources: tuple[str, ...]
    stacked: bool = False
    transform: Transform = identity
    experts: int | None = None

    @property
    def stack(self) -> tuple[int, ...]:
        """Sizes of the axes on which the arrays are stacked."""
        count = len(self.sources)
        if self.experts is not None:
            return count // self.experts, self.experts
        return (count,) if self.stacked else ()


def layered(
    pattern: str, layers: int | Sequence[int], transform: Transform = identity
) -> Recipe:
    """Returns a recipe that stacks one stored array per layer.

    Args:
      pattern: name of the arrays, with `{}` for the layer's index.
      layers: number of layers `L`, or the indices of some layers.
      transform: transform applied to each array.
    """
    numbers = range(layers) if isinstance(layers, int) else layers
    return Recipe(tuple(pattern.format(i) for i in numbers), True, transform)


def check_recipe(
    path: str,
    shape: tuple[int, ...],
    recipe: Recipe,
    stored: Mapping[str, StoredTensor],
) -> None:
    """Checks that a recipe produces the shape of a parameter, without reading it.

    Raises:
      InputError: for another shape, or a dtype that is not floating-point.
    """
    stack = recipe.stack
    if shape[: len(stack)] != stack:
        raise InputError(
            f"{path} has shape {shape} in the model, but its recipe stacks "
            f"{len(recipe.sources)} arrays; were both made from one config?"
        )
    expected = shape[len(stack) :]
    for name in recipe.sources:
        tensor = stored[name]
        if tensor.dtype.name not in FLOATING:
            raise InputError(
                f"{path}: {name} in {tensor.source} is {tensor.dtype.name}, expected "
                f"one of {', '.join(FLOATING)}; quantized weights are not supported: "
                "use the folder of the unquantized model"
            )
        transformed = transformed_shape(path, name, tensor, recipe.transform)
        if transformed != expected:
            raise InputError(
                f"{path}: {name} in {tensor.source} has shape {tensor.shape}, which "
                f"gives {transformed}, but the model expects {expected}; does the "
                "config belong to this checkpoint?"
            )


def transformed_shape(
    path: str, name: str, tensor: StoredTensor, transform: Transform
) -> tuple[int, ...]:
    """Returns the shape of a transformed array, without reading it.

    Raises:
      InputError: if the array cannot be transformed.
    """
    # A broadcast view of one element has the shape but needs no memory.
    stand_in = np.broadcast_to(np.zeros((), tensor.dtype), tensor.shape)
    try:
        return transform(stand_in).shape
    except ValueError as error:
        raise InputError(
            f"{path}: {name} in {tensor.source} has shape {tensor.shape}, which cannot "
            f"be split: {error}"
        ) from error


def assemble(
    path: str,
    shape: tuple[int, ...],
    dtype: np.dtype,
    recipe: Recipe,
    stored: Mapping[str, StoredTensor],
) -> np.ndarray:
    """Reads one parameter; see `assemble_parts`."""
    (parameter,) = assemble_parts(path, shape, dtype, recipe, stored, [whole(shape)])
    return parameter


def assemble_parts(
    path: str,
    shape: tuple[int, ...],
    dtype: np.dtype,
    recipe: Recipe,
    stored: Mapping[str, StoredTensor],
    parts: Sequence[Block],
) -> list[np.ndarray]:
    """Reads blocks of one parameter, and only the data that they need.

    The results are allocated once and filled layer by layer, cast while copying, so
    reading needs memory only for the blocks and for a block of one stored array.
    `parts` are distinct.

    Raises:
      InputError: see `check_recipe`.
    """
    check_recipe(path, shape, recipe, stored)
    results = [empty(extent(part), dtype) for part in parts]
    for name, layers in by_source(recipe, results, parts):
        blocks = [block for _, block in layers]
        sources = read_blocks(stored[name], recipe.transform, blocks)
        for (layer, _), source in zip(layers, sources, strict=True):
            for tile in tiles(source.shape):
                layer[tile] = source[tile]
    return results


def by_source(
    recipe: Recipe, results: Sequence[np.ndarray], parts: Sequence[Block]
) -> Iterator[tuple[str, list[tuple[np.ndarray, Block]]]]:
    """Yields each stored array that blocks of a parameter need.

    Yields:
      the name of a stored array, with a list of the memory to fill from it and the
      block of the transformed array to fill it with.
    """
    depth = len(recipe.stack)
    for name, place in zip(recipe.sources, np.ndindex(*recipe.stack), strict=True):
        targets = []
        for result, part in zip(results, parts, strict=True):
            stacked = list(zip(place, part[:depth], strict=True))
            if all(axis.start <= index < axis.stop for index, axis in stacked):
                within = tuple(index - axis.start for index, axis in stacked)
                targets.append((result[(*within, ...)], tuple(part[depth:])))
        if targets:
            yield name, targets


def read_blocks(
    tensor: StoredTensor, transform: Transform, blocks: Sequence[Block]
) -> list[np.ndarray]:
    """Reads blocks of a transformed array.

    Blocks that fill a larger block are read as one, so that a compressed chunk that
    they share is decompressed only once.
    """
    bounds = joined(blocks)
    if bounds is None:
        return [transform.read(tensor, block) for block in blocks]
    array = transform.read(tensor, bounds)
    return [array[relative(block, bounds)] for block in blocks]


def tiles(shape: tuple[int, ...]) -> Iterator[tuple]:
    """Yields indices of square tiles of the last two axes.

    Copying a transposed array in tiles that fit in the cache is twice as fast. An array
    with fewer than two axes is a single tile.
    """
    if len(shape) < 2:
        yield (...,)
        return
    for row in range(0, shape[-2], TILE):
        for column in range(0, shape[-1], TILE):
            yield ..., slice(row, row + TILE), slice(column, column + TILE)


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocates an array, aligned so that JAX uses it on a CPU without a copy."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
