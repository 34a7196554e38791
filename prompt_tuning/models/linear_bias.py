"""ALiBi: a bias on the scores that is linear in the distance (Press et al. 2022)."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from prompt_tuning.sharding import collectives


def slopes(heads: int) -> Float[np.ndarray, "H"]:
    """Returns the slope of each head (Press et al. 2022, section 3).

    For a power of two they are `2 ** (-8 n / heads)`, `n` from 1. Otherwise the slopes
    of the next lower power of two come first, then every second slope of the next
    higher one.
    """
    power = 2 ** math.floor(math.log2(heads))
    first = 2.0 ** (-8 / power * np.arange(1, power + 1))
    between = 2.0 ** (-4 / power * np.arange(1, 2 * (heads - power), 2))
    return np.concatenate([first, between])


def linear_bias(
    queries: Int[Array, "#R Q"], keys: Int[Array, "#R S"], heads: int
) -> Float[Array, "#R h Q S"]:
    """Computes the bias of every score, for this device's heads.

    `queries` and `keys` are positions; `heads` counts the heads `H` of all devices.
    """
    count = collectives.local_head_count(heads)
    first, _ = collectives.head_range(count)
    local = jnp.asarray(slopes(heads), jnp.float32)[first + jnp.arange(count)]
    distance = queries[:, None, :, None] - keys[:, None, None, :]  # [R, 1, Q, S]
    return -local[:, None, None] * distance
