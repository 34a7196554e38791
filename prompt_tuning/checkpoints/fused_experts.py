"""Projections of all experts of a layer, stored as one tensor."""

import dataclasses

import numpy as np

from prompt_tuning.checkpoints.stored_tensors import StoredTensor, Transform
from prompt_tuning.core.array_slices import Block


@dataclasses.dataclass(frozen=True)
class FusedExperts(Transform):
    """Takes one of the projections of all experts, stored `[E, out, in]`.

    Attributes:
      index: index of the part.
      parts: number of parts of equal size, one after the other.
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
        *others, last = block
        pairs = tensor.read((*others, slice(2 * last.start, 2 * last.stop)))
        return pairs[..., self.first :: 2]
