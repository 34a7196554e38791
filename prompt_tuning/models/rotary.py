"""Rotary embedding of queries and keys (Su et al. 2021)."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.rotary_scaling import QueryScaling, RotaryDivisors


class RotaryAngles(NamedTuple):
    """Rotation of queries and keys at each position, from one table or a few.

    Attributes:
      cosine: cosines of the angles, `[n, 1, K / 2]`, or stacked tables.
      sine: their sines.
      query_factor: factor of queries (see `QueryScaling`), or stacked tables; None for
        no factor.
      rotated: which of the stacked tables rotate; None if all do.
    """

    cosine: Float[Array, "*tables n 1 half"]
    sine: Float[Array, "*tables n 1 half"]
    query_factor: Float[Array, "*tables n 1 1"] | None = None
    rotated: Bool[Array, "*tables"] | None = None

    def of_table(self, index: Int[Array, ""] | None) -> "RotaryAngles":
        """Selects one of the stacked tables; with index None returns the only one."""
        if index is None:
            return self
        factor, rotated = (
            None if part is None else part[index]
            for part in (self.query_factor, self.rotated)
        )
        return RotaryAngles(self.cosine[index], self.sine[index], factor, rotated)

    def within(self, head_width: int) -> "RotaryAngles":
        """Cuts the angles to heads that may be narrower than the widest."""
        half = head_width // 2
        cosine, sine = self.cosine[..., :half], self.sine[..., :half]
        return self._replace(cosine=cosine, sine=sine)


def rotary_table_indices(config: ModelConfig) -> list[int]:
    """Returns the index of each layer's table of rotary angles; see `rotary_angles`."""
    indices = [0] * config.layers
    if config.window_rotary_base is not None:
        for layer in config.windowed_layers:
            indices[layer] = 1
    for layer in config.unrotated_layers:
        indices[layer] = 2
    return indices


def rotary_frequencies(config: ModelConfig) -> Float[np.ndarray, "half"]:
    """Computes the angle per position for each pair (Su et al. 2021, equation 15).

    With `RotaryScaling` low frequencies are divided by a factor (Llama 3.1).
    """
    scaling = config.rotary_scaling
    frequencies = _frequencies(config.rotary_base, config.rotated_width)
    if scaling is None:
        return frequencies
    if isinstance(scaling, RotaryDivisors):
        return frequencies / np.array(scaling.divisors)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    # Full turns within the original context; many turns mean a high frequency.
    turns = scaling.original_positions * frequencies / (2 * np.pi)
    # Weight of the unscaled frequency: 1 keeps it, 0 divides it by the factor.
    keep = np.clip((turns - low) / (high - low), 0, 1) if high > low else 0.0
    return frequencies * (keep + (1 - keep) / scaling.factor)


def _frequencies(base: float, width: int) -> Float[np.ndarray, "half"]:
    return base ** (-np.arange(0, width, 2) / width)


def rotary_angles(positions: Int[Array, "n"], config: ModelConfig) -> RotaryAngles:
    """Computes cosines and sines of rotary angles (Su et al. 2021, equation 34).

    If layers differ there are three stacked tables: the usual angles, the unscaled
    angles of `window_rotary_base`, and zeros for layers without rotary embedding.
    """
    frequencies, scaling = rotary_frequencies(config), config.rotary_scaling
    magnitude = scaling.magnitude if isinstance(scaling, RotaryDivisors) else 1.0
    alike = not any(rotary_table_indices(config))
    query, factor = config.query_scaling, None
    if query is not None and not (query.unrotated and alike):
        factor = _query_factor(positions, query)
    if alike:
        parts = _cosines_and_sines(positions, frequencies, magnitude)
        return RotaryAngles(*parts, factor)
    base = config.window_rotary_base or config.rotary_base
    width = config.windowed_head_width or config.rotated_width
    windowed = _frequencies(base, width)
    tables = (
        (frequencies, magnitude),
        (np.pad(windowed, (0, len(frequencies) - len(windowed))), 1.0),
        (np.zeros_like(frequencies), 1.0),
    )
    parts = [_cosines_and_sines(positions, *table) for table in tables]
    cosines, sines = zip(*parts, strict=True)
    if query is not None and factor is not None:
        rotated = jnp.ones_like(factor) if query.unrotated else factor
        factor = jnp.stack([rotated, rotated, factor])
    of_tables = jnp.array([True, True, False])
    return RotaryAngles(jnp.stack(cosines), jnp.stack(sines), factor, of_tables)


def _query_factor(
    positions: Int[Array, "n"], scaling: QueryScaling
) -> Float[Array, "n 1 1"]:
    times = ((positions + scaling.first) // scaling.positions).astype(jnp.float32)
    return (1 + scaling.slope * jnp.log1p(times))[:, None, None]


def _cosines_and_sines(
    positions: Int[Array, "n"], frequencies: np.ndarray, magnitude: float
) -> tuple[Float[Array, "n 1 half"], Float[Array, "n 1 half"]]:
    # [n] -> [n, 1, K / 2]: one angle per pair, the same for all heads.
    angles = positions[..., None, None] * jnp.asarray(frequencies, jnp.float32)
    if magnitude == 1:
        return jnp.cos(angles), jnp.sin(angles)
    return jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude


def rotate_queries_and_keys(
    queries: Float[Array, "n H K"],
    keys: Float[Array, "n G J"],
    angles: RotaryAngles,
    *,
    interleaved: bool = False,
) -> tuple[Float[Array, "n H K"], Float[Array, "n G J"]]:
    """Rotates queries and keys with `rotate`, and scales queries by position.

    Keys of latent attention are narrower here: their unrotated elements are added
    later.
    """
    parts = [rotate(x, angles, interleaved=interleaved) for x in (queries, keys)]
    if angles.query_factor is None:
        return parts[0], parts[1]
    return parts[0] * angles.query_factor.astype(queries.dtype), parts[1]


def rotate(
    x: Float[Array, "n heads K"],
    angles: RotaryAngles,
    *,
    interleaved: bool = False,
) -> Float[Array, "n heads K"]:
    """Rotates the first half of each head against the second, as Hugging Face does.

    Elements of the head without angles stay as they are. With `interleaved`, each
    element at an even index is rotated against its right neighbor, as in the original
    (Su et al. 2021, equation 34).
    """
    cosine, sine = angles.cosine, angles.sine
    half = cosine.shape[-1]
    wide = x[..., : 2 * half].astype(jnp.float32)
    if interleaved:
        first, second = wide[..., ::2], wide[..., 1::2]  # [n, heads, K / 2]
    else:
        first, second = jnp.split(wide, 2, axis=-1)
    rotated = [first * cosine - second * sine, second * cosine + first * sine]
    rotated = [part.astype(x.dtype) for part in rotated]
    if interleaved:
        rotated = [jnp.stack(rotated, axis=-1).reshape(*wide.shape)]
    rest = [] if x.shape[-1] == 2 * half else [x[..., 2 * half :]]
    return jnp.concatenate([*rotated, *rest], axis=-1)
