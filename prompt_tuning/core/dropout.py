"""Dropout with the same mask on every mesh.

The random bits of an element depend only on the key and on the element's index in the
whole batch: its position among all positions and its column among all columns. So a
device with a shard of the rows or columns draws the same bits as a single device would.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Bool, Float, Int, Key


class DropoutIndex(NamedTuple):
    """Two numbers that identify an element of the whole batch; they broadcast together.

    Attributes:
      high: e.g. the index of the element's position.
      low: e.g. its column.
    """

    high: Int[Array, "..."]
    low: Int[Array, "..."]

    @classmethod
    def at_positions(
        cls, numbers: Int[Array, "*lead"], width: int, first: Int[Array, ""] | int = 0
    ) -> "DropoutIndex":
        """Indexes columns `[first, first + width)` at the given positions."""
        return cls(numbers[..., None], first + jnp.arange(width))

    @classmethod
    def for_rows(
        cls, shape: tuple[int, ...], first: Int[Array, ""] | int = 0
    ) -> "DropoutIndex":
        """Indexes rows `[R, Q, D]` from row `first` of the batch on."""
        rows, length, width = shape
        # [R, Q]: number of each position.
        numbers = (first + jnp.arange(rows))[:, None] * length + jnp.arange(length)
        return cls.at_positions(numbers, width)


def dropout(
    x: Float[Array, "..."],
    rate: float | int,
    key: Key[Array, ""] | None,
    index: DropoutIndex,
) -> Float[Array, "..."]:
    """Zeroes each element with probability `rate` and scales the rest up.

    The mask depends only on key and index, so a rematerialized forward pass draws it
    again bit for bit. Without a key, `x` is returned unchanged.

    Args:
      x: input.
      rate: a Python number, at least 0 and below 1.
      key: random key, or None.
      index: index of each element; broadcasts to the shape of `x`.
    """
    if key is None or rate == 0.0:
        return x
    keep = _keep_mask(key, rate, index, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)


def _keep_mask(
    key: Key[Array, ""], rate: float | int, index: DropoutIndex, shape: tuple[int, ...]
) -> Bool[Array, "..."]:
    """Hashes the index with Threefry (Salmon et al. 2011, section 3.3)."""
    high, low = (jnp.broadcast_to(x, shape).astype(jnp.uint32) for x in index)
    first, second = jax.random.bits(key, (2,), jnp.uint32)
    bits = jnp.bitwise_xor(*threefry2x32_p.bind(first, second, high, low))
    return bits >= jnp.uint32(round(rate * 2**32))
