"""Weights of depthwise convolutions, which files store as `[C, 1, taps]`."""

import dataclasses

import numpy as np

from prompt_tuning.checkpoints.stored_tensors import FusedPart, StoredTensor, Transform
from prompt_tuning.core.array_slices import Block


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
