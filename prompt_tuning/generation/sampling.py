"""Functions that choose the next token from its logits."""

import dataclasses
import math
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


@dataclasses.dataclass(frozen=True)
class TemperatureSampler:
    """Draws from `softmax(logits / temperature)`, each row with its own key.

    Equal settings are equal samplers, so that they share compiled programs.

    Attributes:
      temperature: temperature, above 0.
      top_k: number of tokens with the highest logits to draw from; None for all.
      top_p: the tokens to draw from are the most probable ones whose probabilities
        add up to at least this (nucleus sampling, Holtzman et al. 2020), after `top_k`;
        None for all.
    """

    temperature: float
    top_k: int | None = None
    top_p: float | None = None

    def __call__(
        self, logits: Float[Array, "B V"], keys: Key[Array, "B"]
    ) -> Int[Array, "B"]:
        """Draws a token for each row."""
        scaled = logits / self.temperature
        if self.top_k is not None:
            scaled = keep_top_k(scaled, self.top_k)
        if self.top_p is not None:
            scaled = keep_top_p(scaled, self.top_p)
        return jax.vmap(jax.random.categorical)(keys, scaled).astype(jnp.int32)


def keep_top_k(logits: Float[Array, "B V"], count: int) -> Float[Array, "B V"]:
    """Sets all but the `count` highest logits to -inf; ties with the last remain."""
    count = min(count, logits.shape[-1])
    lowest = jax.lax.top_k(logits, count)[0][..., -1:]  # [B, 1]
    return jnp.where(logits < lowest, -jnp.inf, logits)


def keep_top_p(logits: Float[Array, "B V"], share: float) -> Float[Array, "B V"]:
    """Sets all but the most probable tokens to -inf.

    A token remains if the more probable ones add up to less than `share`, so that the
    most probable one always does.
    """
    order = jnp.argsort(-logits, axis=-1)
    probabilities = jax.nn.softmax(jnp.take_along_axis(logits, order, -1), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept = jnp.take_along_axis(before < share, jnp.argsort(order, axis=-1), -1)
    return jnp.where(kept, logits, -jnp.inf)


def temperature_sampler(
    temperature: float | int,
    top_k: int | None = None,
    top_p: float | int | None = None,
) -> Sampler:
    """Returns a sampler with a temperature; see `TemperatureSampler`.

    Args:
      temperature: temperature; 0 selects `greedy`.
      top_k: number of tokens to draw from; None for all.
      top_p: share of the probability to draw from; None for all of it.

    Raises:
      InputError: if a setting is out of range, or is without effect because the
        temperature is 0.
    """
    if not 0 <= temperature < math.inf:
        raise InputError(f"temperature is {temperature}, expected 0 (greedy) or more")
    if top_k is not None and top_k < 1:
        raise InputError(f"top_k is {top_k}, expected at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise InputError(f"top_p is {top_p}, expected a number above 0, up to 1")
    if temperature > 0:
        nucleus = None if top_p is None else float(top_p)
        return TemperatureSampler(float(temperature), top_k, nucleus)
    if top_k is not None or top_p is not None:
        raise InputError(
            "the temperature is 0, which always takes the most probable token, so "
            "top_k and top_p have no effect: set a temperature, such as "
            "--temperature 0.7"
        )
    return greedy
