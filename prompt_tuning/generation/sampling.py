"""Functions that choose the next token from its logits."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from prompt_tuning.core.errors import InputError

Sampler = Callable[[Float[Array, "B V"], Key[Array, "B"]], Int[Array, "B"]]


def greedy(logits: Float[Array, "B V"], keys: Key[Array, "B"]) -> Int[Array, "B"]:
    """Returns the token with the highest logit; of equal ones the lowest id."""
    del keys
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def temperature_sampler(value: float) -> Sampler:
    """Returns a sampler that draws from `softmax(logits / value)`.

    Each row is drawn with its own key.

    Args:
      value: temperature, above 0; 0 selects `greedy`.

    Raises:
      InputError: if the temperature is negative.
    """
    if value < 0:
        raise InputError(f"temperature is {value}, expected 0 (greedy) or more")
    if value == 0:
        return greedy

    def sample(logits, keys):
        # [B, V] logits and [B] keys -> [B]
        drawn = jax.vmap(jax.random.categorical)(keys, logits / value)
        return drawn.astype(jnp.int32)

    return sample
