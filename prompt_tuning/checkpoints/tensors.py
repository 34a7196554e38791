"""Stored arrays, and how a parameter of ours is made of them.

A format gives `dict[name, StoredTensor]`, a model family gives `dict[path, Recipe]`;
what puts the two together knows neither.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from jaxtyping import Float32, Int8

from prompt_tuning.errors import InputError
from prompt_tuning.models.quantization import channel_scale, quantize

Transform = Callable[[np.ndarray], np.ndarray]
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
      read: reads it, as an array of that shape and dtype, perhaps a view of the file.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    source: str
    read: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes that it takes, uncompressed."""
        return self.size * self.dtype.itemsize


def identity(stored: np.ndarray) -> np.ndarray:
    """The array as it is stored."""
    return stored


def transpose(stored: np.ndarray) -> np.ndarray:
    """The array with its axes reversed: `[out, in]` to `[in, out]`."""
    return stored.T


@dataclasses.dataclass(frozen=True)
class FusedPart:
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
    """Reads one parameter.

    The result is allocated once and filled layer by layer, each cast on its way in, so
    that reading needs the parameter and one stored array of memory.

    Args:
      path: the parameter, for messages.
      shape: its shape in the model.
      dtype: its dtype in the model.
      recipe: how it is made.
      stored: the checkpoint.

    Raises:
      InputError: as `check_recipe` does.
    """
    check_recipe(path, shape, recipe, stored)
    result = _empty(shape, dtype)
    slices = result if recipe.stacked else result[None]
    for index, name in enumerate(recipe.sources):
        source = recipe.transform(stored[name].read())
        for tile in _tiles(source.shape):
            slices[index][tile] = source[tile]
    return result


def assemble_quantized(
    path: str,
    shape: tuple[int, ...],
    recipe: Recipe,
    stored: Mapping[str, StoredTensor],
) -> tuple[Int8[np.ndarray, "L in out"], Float32[np.ndarray, "L out"]]:
    """Reads one kernel and quantises it, layer by layer; arguments as for `assemble`.

    Returns:
      the kernel in int8, and the scale of each of its output channels.

    Raises:
      InputError: as `check_recipe` does, and for weights that are not finite.
    """
    check_recipe(path, shape, recipe, stored)
    kernel = _empty(shape, np.dtype(np.int8))
    scales = _empty((*shape[:-2], shape[-1]), np.dtype(np.float32))
    slices = kernel if recipe.stacked else kernel[None]
    scale_slices = scales if recipe.stacked else scales[None]
    for index, name in enumerate(recipe.sources):
        weights = recipe.transform(stored[name].read())
        scale = channel_scale(weights)
        if not np.isfinite(scale).all():
            raise InputError(
                f"{path}: {name} in {stored[name].source} holds numbers that are not "
                "finite, and cannot be quantised; is the checkpoint damaged?"
            )
        scale_slices[index] = scale
        for tile in _tiles(weights.shape):
            ours = scale[..., tile[-1]]
            slices[index][tile] = quantize(weights[tile], ours)
    return kernel, scales


def _tiles(shape: tuple[int, ...]) -> Iterator[tuple]:
    """Indices of squares of the last two axes; of all there is below two.

    A transposed array is copied twice as fast in squares that fit a cache.
    """
    if len(shape) < 2:
        yield (...,)
        return
    for row in range(0, shape[-2], TILE):
        for column in range(0, shape[-1], TILE):
            yield ..., slice(row, row + TILE), slice(column, column + TILE)


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory that JAX takes over on a CPU as it is: it copies what is less aligned."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
