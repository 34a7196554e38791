"""NF4 scales quantized once more, to eight-bit codes with second-level scales.

A scale is `t[code] * largest + offset`, where `largest` is the largest difference from
the offset in a block of scales (Dettmers et al. 2023, "QLoRA", section 3). It is
computed where its kernel is widened, so no layer keeps its scales in float32.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Float32, UInt8


def dynamic_map() -> Float32[np.ndarray, "256"]:
    """Returns the 256 values that bitsandbytes rounds scales to, in order.

    Each power of ten from 1e-6 to 1 has twice as many as the one before, of both signs
    (Dettmers 2016, "8-bit approximations", section 2.2; here as in bitsandbytes'
    `create_dynamic_map`).
    """
    values = [np.array([0, 1], np.float32)]
    for i in range(7):
        ends = np.linspace(0.1, 1, 2**i + 1, dtype=np.float32)
        means = (ends[:-1] + ends[1:]) / np.float32(2)
        part = (10.0 ** (i - 6) * means.astype(float)).astype(np.float32)
        values += [part, -part]
    return np.sort(np.concatenate(values))


DYNAMIC_MAP = dynamic_map()
_LIMITS = (DYNAMIC_MAP[1:] + DYNAMIC_MAP[:-1]) / 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScalesInCodes:
    """Scales of a kernel in groups, which `astype` dequantizes.

    Attributes:
      codes: uint8 `[groups, out]`.
      largest: float32 `[groups / n, out]`, one for every `n` groups of an output.
      table: float32 `[257]`, the values of the codes, then the offset.
    """

    # JAX also puts descriptions of arrays in the place of the arrays.
    codes: Any
    largest: Any
    table: Any

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.codes.ndim

    def astype(self, dtype: DTypeLike) -> Float[Array, "groups out"]:
        """Returns the scales."""
        blocks = self.codes.reshape(len(self.largest), -1, self.codes.shape[1])
        values = self.table.at[blocks.astype(jnp.int32)].get(mode="promise_in_bounds")
        scales = values * self.largest[:, None] + self.table[-1]
        return scales.reshape(self.codes.shape).astype(dtype)


def quantized_scales(
    scales: Float32[Array, "*lead groups out"], n: int
) -> ScalesInCodes:
    """Quantizes the scales of kernels, in blocks of `n`."""
    *lead, groups, size_out = scales.shape
    offset = scales.mean((-2, -1))  # [...]
    relative = scales - offset[..., None, None]
    blocks = relative.reshape(*lead, groups // n, n, size_out)
    largest = jnp.abs(blocks).max(-2)
    ratio = blocks / jnp.where(largest == 0, 1, largest)[..., None, :]
    codes = jnp.searchsorted(jnp.asarray(_LIMITS), ratio).reshape(scales.shape)
    values = jnp.broadcast_to(jnp.asarray(DYNAMIC_MAP), (*lead, 256))
    table = jnp.concatenate([values, offset[..., None]], axis=-1)
    return ScalesInCodes(codes.astype(jnp.uint8), largest, table)


@dataclasses.dataclass(frozen=True)
class NestedScales:
    """Scales of consecutive weights in codes, as bitsandbytes stores them.

    Attributes:
      codes: code of each scale.
      largest: largest difference from the offset in each block of 256 scales.
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
        codes = np.searchsorted(_LIMITS, relative.ravel()[: len(scales)])
        return cls(codes.astype(np.uint8), largest, float(offset))
