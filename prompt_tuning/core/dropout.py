"""Dropout by places in the whole batch: the same mask on every mesh.

The random bits of a number are a function of the key and of where the number stands:
its position among all positions of the batch and its column among all columns. A device
that has some rows and some columns draws what one device would draw for them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Bool, Float, Int, Key


class DropoutIndex(NamedTuple):
    """Two numbers that tell a place from all others; they broadcast together.

    Attributes:
      high: such as the position's number.
      low: such as the column's.
    """

    high: Int[Array, "..."]
    low: Int[Array, "..."]

    @classmethod
    def at_positions(
        cls, numbers: Int[Array, "*lead"], width: int, first: Int[Array, ""] | int = 0
    ) -> "DropoutIndex":
        """Of `width` columns at each of some positions, from column `first` on."""
        return cls(numbers[..., None], first + jnp.arange(width))

    @classmethod
    def for_rows(
        cls, shape: tuple[int, ...], first: Int[Array, ""] | int = 0
    ) -> "DropoutIndex":
        """Of rows `[R, Q, D]`, the first of which has the number `first`."""
        rows, length, width = shape
        numbers = (first + jnp.arange(rows))[:, None] * length + jnp.arange(length)
        return cls.at_positions(numbers, width)


def dropout(
    x: Float[Array, "..."],
    rate: float,
    key: Key[Array, ""] | None,
    index: DropoutIndex,
) -> Float[Array, "..."]:
    """Zeroes each number with probability `rate` and scales the rest; no key, no-op.

    The mask is a function of key and places alone, so that a recomputed forward pass
    draws it again bit for bit.

    Args:
      x: numbers.
      rate: a Python number from 0 to below 1.
      key: random key, or None.
      index: of each number, `x`'s shape after broadcasting.
    """
    if key is None or rate == 0.0:
        return x
    kept = _keep_mask(key, rate, index, x.shape)
    return jnp.where(kept, x / (1.0 - rate), 0).astype(x.dtype)


def _keep_mask(
    key: Key[Array, ""], rate: float, places: DropoutIndex, shape: tuple[int, ...]
) -> Bool[Array, "..."]:
    """Threefry of the places (Salmon et al. 2011, section 3.3)."""
    high, low = (jnp.broadcast_to(x, shape).astype(jnp.uint32) for x in places)
    first, second = jax.random.bits(key, (2,), jnp.uint32)
    bits = jnp.bitwise_xor(*threefry2x32_p.bind(first, second, high, low))
    return bits >= jnp.uint32(round(rate * 2**32))
