"""Scales of NF4 that are quantized too, as bitsandbytes stores them."""

import dataclasses

import numpy as np
from jaxtyping import Float32, UInt8


def dynamic_map() -> Float32[np.ndarray, "256"]:
    """Returns the 256 values that bitsandbytes rounds scales to, in order.

    For each power of ten from 1e-6 to 1 there are twice as many as for the one before,
    of both signs (Dettmers 2016, "8-bit approximations", section 2.2; here as
    `create_dynamic_map` of bitsandbytes has them).
    """
    values = [np.array([0, 1], np.float32)]
    for i in range(7):
        ends = np.linspace(0.1, 1, 2**i + 1, dtype=np.float32)
        means = (ends[:-1] + ends[1:]) / np.float32(2)
        part = (10.0 ** (i - 6) * means.astype(float)).astype(np.float32)
        values += [part, -part]
    return np.sort(np.concatenate(values))


DYNAMIC_MAP = dynamic_map()


@dataclasses.dataclass(frozen=True)
class NestedScales:
    """Scales in eight bits (Dettmers et al. 2023, "QLoRA", section 3).

    A scale is `t[code] * largest + offset`, with the largest difference from the offset
    in each block of 256 scales.

    Attributes:
      codes: code of each scale.
      largest: scale of each block of scales.
      offset: mean of all scales.
    """

    BLOCK = 256
    SETTINGS = 320
    """Length of the settings as JSON, which end with spaces."""

    codes: UInt8[np.ndarray, "blocks"]
    largest: Float32[np.ndarray, "outer"]
    offset: float

    @classmethod
    def of(cls, scales: Float32[np.ndarray, "blocks"]) -> "NestedScales":
        """Rounds scales."""
        offset = np.float32(scales.mean(dtype=np.float64))
        padding = -len(scales) % cls.BLOCK
        blocks = np.pad(scales - offset, (0, padding)).reshape(-1, cls.BLOCK)
        largest = np.abs(blocks).max(1)
        relative = blocks / np.where(largest == 0, np.float32(1), largest)[:, None]
        limits = (DYNAMIC_MAP[1:] + DYNAMIC_MAP[:-1]) / 2
        codes = np.searchsorted(limits, relative.ravel()[: len(scales)])
        return cls(codes.astype(np.uint8), largest, float(offset))
