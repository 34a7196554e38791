"""How the next token is chosen from scores."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from prompt_tuning.core.errors import InputError

Sampler = Callable[[Float[Array, "B V"], Key[Array, "B"]], Int[Array, "B"]]


def greedy(logits: Float[Array, "B V"], keys: Key[Array, "B"]) -> Int[Array, "B"]:
    """The token with the highest score; the lowest id among equals."""
    del keys
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def temperature_sampler(value: float) -> Sampler:
    """Draws from `softmax(logits / value)`, each row with a key of its own.

    Args:
      value: above 0; 0 means `greedy`.

    Raises:
      InputError: if the temperature is negative.
    """
    if value < 0:
        raise InputError(f"temperature is {value}, expected 0 (greedy) or more")
    if value == 0:
        return greedy

    def sample(logits, keys):
        drawn = jax.vmap(jax.random.categorical)(keys, logits / value)
        return drawn.astype(jnp.int32)

    return sample
