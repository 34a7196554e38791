"""NF4 scales that are quantized themselves, as bitsandbytes stores them."""

import dataclasses

import numpy as np
from jaxtyping import Float32, UInt8

from prompt_tuning.core.quantization.scales_in_codes import DYNAMIC_MAP


@dataclasses.dataclass(frozen=True)
class NestedScales:
    """Scales in eight bits (Dettmers et al. 2023, "QLoRA", section 3).

    A scale is `t[code] * largest + offset`, where `largest` is the largest difference
    from the offset in a block of 256 scales.

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
        """Quantizes scales."""
        offset = np.float32(scales.mean(dtype=np.float64))
        padding = -len(scales) % cls.BLOCK
        blocks = np.pad(scales - offset, (0, padding)).reshape(-1, cls.BLOCK)
        largest = np.abs(blocks).max(1)
        relative = blocks / np.where(largest == 0, np.float32(1), largest)[:, None]
        limits = (DYNAMIC_MAP[1:] + DYNAMIC_MAP[:-1]) / 2
        codes = np.searchsorted(limits, relative.ravel()[: len(scales)])
        return cls(codes.astype(np.uint8), largest, float(offset))
