"""Transforms of tensors that files store in special layouts: experts, and taps."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from prompt_tuning.checkpoints.quantized.codes import WidenedTensor
from prompt_tuning.checkpoints.stored_tensors import (
    FusedPart,
    Recipe,
    StoredTensor,
    Transform,
    transformed_shape,
    transpose,
)
from prompt_tuning.core.array_slices import Block


@dataclasses.dataclass(frozen=True)
class FusedExperts(Transform):
    """Takes one of the projections of all experts, stored `[E, out, in]`.

    The tensor has `parts` equal parts, one after the other.
    """

    index: int = 0
    parts: int = 1

    def __call__(self, stored: np.ndarray) -> np.ndarray:
        """Returns the part, `[E, in, out]`.

        Raises:
          ValueError: if the number of columns is not divisible.
        """
        return np.split(stored.swapaxes(1, 2), self.parts, axis=2)[self.index]

    def read(self, tensor: StoredTensor, block: Block) -> np.ndarray:
        """Reads the block of the part."""
        experts, rows, columns = block
        first = tensor.shape[1] // self.parts * self.index
        stored = slice(columns.start + first, columns.stop + first)
        return tensor.read((experts, stored, rows)).swapaxes(1, 2)


@dataclasses.dataclass(frozen=True)
class TurnedExperts(FusedExperts):
    """Takes the same of tensors that some files store as `[E, in, out]`.

    Attributes:
      outputs: number of outputs of all parts, which tells both layouts apart; if the
        number of inputs is the same, tensors are `[E, out, in]`.
    """

    outputs: int = 0

    def __call__(self, stored: np.ndarray) -> np.ndarray:
        """Returns the part, `[E, in, out]`.

        Raises:
          ValueError: if the number of columns is not divisible.
        """
        usual = stored.shape[1] == self.outputs
        return super().__call__(stored if usual else stored.swapaxes(1, 2))

    def read(self, tensor: StoredTensor, block: Block) -> np.ndarray:
        """Reads the block of the part."""
        if tensor.shape[1] == self.outputs:
            return super().read(tensor, block)
        part = FusedPart(self.index, (1,) * self.parts)
        return part.read(tensor, block)


@dataclasses.dataclass(frozen=True)
class EveryOther(Transform):
    """Takes every other number of the last axis.

    Attributes:
      first: index of the first one, 0 or 1.
    """

    first: int

    def __call__(self, stored: np.ndarray) -> np.ndarray:
        """Returns the numbers.

        Raises:
          ValueError: if their count is odd.
        """
        if stored.shape[-1] % 2:
            raise ValueError(f"{stored.shape[-1]} columns are not pairs")
        return stored[..., self.first :: 2]

    def read(self, tensor: StoredTensor, block: Block) -> np.ndarray:
        """Reads the pairs of the block."""
        *leading, last = block
        pairs = tensor.read((*leading, slice(2 * last.start, 2 * last.stop)))
        return pairs[..., self.first :: 2]


def experts_apart(
    path: str, recipe: Recipe, stored: Mapping[str, StoredTensor]
) -> tuple[Recipe, dict[str, StoredTensor]]:
    """Returns a recipe with one tensor `[out, in]` per kernel, and these tensors.

    A tensor with all experts of a layer becomes one tensor per expert, each of which
    reads only its own part; other recipes stay the same. Missing tensors are left out.
    """
    tensors = {name: stored[name] for name in recipe.sources if name in stored}
    transform, apart = recipe.transform, {}
    for name, tensor in tensors.items():
        if len(tensor.shape) != 3:
            return recipe, tensors
        shape = transformed_shape(path, name, tensor, transform)
        for expert in range(shape[0]):
            apart[f"{name}[{expert}]"] = _one_expert(tensor, transform, expert)
    count = len(apart) // max(len(tensors), 1)
    return Recipe(tuple(apart), True, transpose, count), apart


def _one_expert(
    tensor: StoredTensor, transform: Transform, expert: int
) -> StoredTensor:
    """Returns the kernel of one expert, `[out, in]`, with its codes."""

    def taken(whole: StoredTensor) -> StoredTensor:
        _, size_in, size_out = transformed_shape("", whole.source, whole, transform)

        def read(block: Block) -> np.ndarray:
            columns, rows = block
            needed = (slice(expert, expert + 1), rows, columns)
            return transform.read(whole, needed)[0].T

        shape = size_out, size_in
        return dataclasses.replace(whole, shape=shape, read_block=read, pieces=None)

    kernel = taken(tensor)
    if not isinstance(kernel, WidenedTensor) or kernel.codes is None:
        return kernel
    return dataclasses.replace(kernel, codes=kernel.codes.changed(taken))


@dataclasses.dataclass(frozen=True)
class TapsFirst(Transform):
    """Rearranges `[C, 1, taps]` to `[taps, C]`."""

    def __call__(self, stored: np.ndarray) -> np.ndarray:
        """Rearranges the axes.

        Raises:
          ValueError: if the convolution mixes channels.
        """
        if stored.ndim != 3 or stored.shape[1] != 1:
            raise ValueError(f"a convolution has shape {stored.shape}, not [C, 1, W]")
        return stored[:, 0].T

    def read(self, tensor: StoredTensor, block: Block) -> np.ndarray:
        """Reads the rearranged block."""
        taps, channels = block
        return tensor.read((channels, slice(0, 1), taps))[:, 0].T


taps_first = TapsFirst()


@dataclasses.dataclass(frozen=True)
class TapsOfPart(Transform):
    """Takes some channels of such weights, and rearranges them.

    Attributes:
      part: which channels.
    """

    part: FusedPart

    def __call__(self, stored: np.ndarray) -> np.ndarray:
        """Returns the weights of the channels, `[taps, channels]`."""
        return self.part(taps_first(stored).T)

    def read(self, tensor: StoredTensor, block: Block) -> np.ndarray:
        """Reads the whole array, which is small, and returns the block."""
        return self(tensor.read())[block]
