"""Stored arrays, and how a parameter of ours is made of them.

A format gives `dict[name, StoredTensor]`, a model family gives `dict[path, Recipe]`;
what puts the two together knows neither.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.slices import Block, extent, joined, relative, whole

PartReader = Callable[[Sequence[Block]], list[np.ndarray]]
"""Reads some parts of one parameter, and nothing else of it."""

FLOATING = ("float64", "float32", "bfloat16", "float16")
ALIGNMENT = 64
TILE = 128


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One array of a checkpoint, read when asked for.

    Attributes:
      shape: its shape.
      dtype: its dtype in the file; bfloat16 is that of `ml_dtypes`.
      source: the file that it lies in, or the folder if it has one of its own.
      read_block: reads a block of it, perhaps as a view of the file.
      pieces: the shape of what is unpacked whole for any number in it; None where any
        number can be read alone.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    source: str
    read_block: Callable[[Block], np.ndarray]
    pieces: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes that it takes, uncompressed."""
        return self.size * self.dtype.itemsize

    def read(self, block: Block | None = None) -> np.ndarray:
        """Reads a block of it, or all of it."""
        return np.asarray(
            self.read_block(whole(self.shape) if block is None else block)
        )


class Transform(abc.ABC):
    """What a stored array goes through: a rearrangement, which copies nothing."""

    @abc.abstractmethod
    def __call__(self, stored: np.ndarray) -> np.ndarray:
        """What is made of a whole array, as a view."""

    @abc.abstractmethod
    def read(self, tensor: StoredTensor, block: Block) -> np.ndarray:
        """A block of what is made of an array, of which only that much is read."""


class Identity(Transform):
    """The array as it is stored."""

    def __call__(self, stored: np.ndarray) -> np.ndarray:
        """The array."""
        return stored

    def read(self, tensor: StoredTensor, block: Block) -> np.ndarray:
        """The same block."""
        return tensor.read(block)


class Transpose(Transform):
    """The array with its axes reversed: `[out, in]` to `[in, out]`."""

    def __call__(self, stored: np.ndarray) -> np.ndarray:
        """Reverses the axes."""
        return stored.T

    def read(self, tensor: StoredTensor, block: Block) -> np.ndarray:
        """The block on the other side of the diagonal."""
        return tensor.read(block[::-1]).T


identity = Identity()
transpose = Transpose()


@dataclasses.dataclass(frozen=True)
class FusedPart(Transform):
    """One of several equal parts that are stored side by side on the last axis.

    Attributes:
      index: which part.
      parts: how many there are.
    """

    index: int
    parts: int

    def __call__(self, stored: np.ndarray) -> np.ndarray:
        """Cuts the part out; `ValueError` if the last axis has no equal parts."""
        return np.split(stored, self.parts, axis=-1)[self.index]

    def read(self, tensor: StoredTensor, block: Block) -> np.ndarray:
        """The block as far to the right as the part stands."""
        *others, last = block
        first = self.index * (tensor.shape[-1] // self.parts)
        own = slice(first + last.start, first + last.stop)
        return tensor.read((*others, own))


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How one parameter is made of stored arrays.

    Attributes:
      sources: names of the stored arrays: one, or one for each layer.
      stacked: whether they are stacked on a leading axis `L`.
      transform: what each goes through; it must return a view.
    """

    sources: tuple[str, ...]
    stacked: bool = False
    transform: Transform = identity


def layered(pattern: str, layers: int, transform: Transform = identity) -> Recipe:
    """Stacks one stored array for each layer.

    Args:
      pattern: their name, with `{}` in the place of the layer's number.
      layers: `L`.
      transform: what each goes through.
    """
    return Recipe(tuple(pattern.format(i) for i in range(layers)), True, transform)


def check_recipe(
    path: str,
    shape: tuple[int, ...],
    recipe: Recipe,
    stored: Mapping[str, StoredTensor],
) -> None:
    """Compares the shape of a parameter with what its recipe makes, reading nothing.

    Args:
      path: the parameter.
      shape: its shape in the model.
      recipe: how it is made; every source is in `stored`.
      stored: the checkpoint.

    Raises:
      InputError: for a shape that differs or for numbers that are not floating.
    """
    if recipe.stacked and shape[:1] != (len(recipe.sources),):
        raise InputError(
            f"{path} has shape {shape} in the model, but its recipe stacks "
            f"{len(recipe.sources)} layers; were both made from one config?"
        )
    expected = shape[1:] if recipe.stacked else shape
    for name in recipe.sources:
        tensor = stored[name]
        if tensor.dtype.name not in FLOATING:
            raise InputError(
                f"{path}: {name} in {tensor.source} is {tensor.dtype.name}, expected "
                f"one of {', '.join(FLOATING)}; quantised checkpoints are not read"
            )
        found = _transformed_shape(path, name, tensor, recipe.transform)
        if found != expected:
            raise InputError(
                f"{path}: {name} in {tensor.source} has shape {tensor.shape}, which "
                f"gives {found}, but the model expects {expected}; does the config "
                "belong to this checkpoint?"
            )


def _transformed_shape(
    path: str, name: str, tensor: StoredTensor, transform: Transform
) -> tuple[int, ...]:
    # A view of one element stands for the array: shapes without memory.
    stand_in = np.broadcast_to(np.zeros((), tensor.dtype), tensor.shape)
    try:
        return transform(stand_in).shape
    except ValueError as error:
        raise InputError(
            f"{path}: {name} in {tensor.source} has shape {tensor.shape}, which cannot "
            f"be taken apart: {error}"
        ) from error


def assemble(
    path: str,
    shape: tuple[int, ...],
    dtype: np.dtype,
    recipe: Recipe,
    stored: Mapping[str, StoredTensor],
) -> np.ndarray:
    """Reads one parameter; see `assemble_parts`."""
    (found,) = assemble_parts(path, shape, dtype, recipe, stored, [whole(shape)])
    return found


def assemble_parts(
    path: str,
    shape: tuple[int, ...],
    dtype: np.dtype,
    recipe: Recipe,
    stored: Mapping[str, StoredTensor],
    parts: Sequence[Block],
) -> list[np.ndarray]:
    """Reads some parts of one parameter, and of the checkpoint what these need.

    The results are allocated once and filled layer by layer, each cast on its way in,
    so that reading needs the parts and a part of one stored array of memory.

    Args:
      path: the parameter, for messages.
      shape: its shape in the model.
      dtype: its dtype in the model.
      recipe: how it is made.
      stored: the checkpoint.
      parts: what is read, none twice.

    Raises:
      InputError: as `check_recipe` does.
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
    """What each stored array fills.

    Args:
      recipe: of a parameter.
      results: memory for parts of it.
      parts: where these stand in it.

    Yields:
      a stored array's name; for each part that has something of it the memory, and the
      block of what the transform makes of the array.
    """
    if not recipe.stacked:
        yield recipe.sources[0], list(zip(results, parts, strict=True))
        return
    for number, name in enumerate(recipe.sources):
        filled = [
            (result[number - layers.start], tuple(block))
            for result, (layers, *block) in zip(results, parts, strict=True)
            if layers.start <= number < layers.stop
        ]
        if filled:
            yield name, filled


def read_blocks(
    tensor: StoredTensor, transform: Transform, blocks: Sequence[Block]
) -> list[np.ndarray]:
    """Blocks of what a transform makes of an array.

    Those that fill a larger block are read as one: a compressed chunk that several of
    them need is then unpacked once.
    """
    around = joined(blocks)
    if around is None:
        return [transform.read(tensor, block) for block in blocks]
    made = transform.read(tensor, around)
    return [made[relative(block, around)] for block in blocks]


def tiles(shape: tuple[int, ...]) -> Iterator[tuple]:
    """Indices of squares of the last two axes; of all there is below two.

    A transposed array is copied twice as fast in squares that fit a cache.
    """
    if len(shape) < 2:
        yield (...,)
        return
    for row in range(0, shape[-2], TILE):
        for column in range(0, shape[-1], TILE):
            yield ..., slice(row, row + TILE), slice(column, column + TILE)


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory that JAX takes over on a CPU as it is: it copies what is less aligned."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
