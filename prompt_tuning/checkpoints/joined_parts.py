"""Projections that a stored one holds in several parts of each of its groups."""

import dataclasses

import numpy as np

from prompt_tuning.checkpoints.stored_tensors import FusedPart, StoredTensor
from prompt_tuning.core.array_slices import Block


@dataclasses.dataclass(frozen=True)
class JoinedParts(FusedPart):
    """Takes neighboring parts: of all groups the first part, then the second, etc.

    Attributes:
      last: index of the last part; `index` is that of the first.
    """

    last: int = 0

    def __call__(self, stored: np.ndarray) -> np.ndarray:
        """Returns the parts, of shape `[..., columns]`.

        Raises:
          ValueError: if the number of columns is not divisible.
        """
        return np.concatenate([part(stored) for part in self._parts()], axis=-1)

    def columns(self, count: int) -> np.ndarray:
        """Returns the indices of the parts among `count` fused columns."""
        return np.concatenate([part.columns(count) for part in self._parts()])

    def read(self, tensor: StoredTensor, block: Block) -> np.ndarray:
        """Reads the groups that the block needs of each part, and returns it."""
        *others, wanted = block
        unit = tensor.shape[-1 if self.in_first else 0] // sum(self.shares)
        start, arrays = 0, []
        for part in self._parts():
            width = unit * share_of(part)
            first, stop = max(wanted.start - start, 0), min(wanted.stop - start, width)
            if first < stop:
                arrays.append(part.read(tensor, (*others, slice(first, stop))))
            start += width
        return np.concatenate(arrays, axis=-1)

    def _parts(self) -> list[FusedPart]:
        return [
            FusedPart(i, self.shares, self.groups, self.in_first)
            for i in range(self.index, self.last + 1)
        ]


def share_of(part: FusedPart) -> int:
    """Returns the relative size of what a part takes."""
    last = part.last if isinstance(part, JoinedParts) else part.index
    return sum(part.shares[part.index : last + 1])
