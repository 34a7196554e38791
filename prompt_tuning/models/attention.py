"""Attention over several sources of keys, and how positions enter it.

A query may look at keys that were computed for it alone, for the whole batch (a
shared prompt) or earlier (a cache). `attend` takes them as a list of sources and
normalises over all of them at once; a source shared by the batch is never copied.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from prompt_tuning.models.config import ModelConfig
from prompt_tuning.models.layers import dropout

# Finite, so that a row that sees nothing (padding) gives numbers and not NaN.
MASKED = -1e10


class KeyValues(NamedTuple):
    """Keys and values `[R, S, G, K]` of one source; `R` is `B`, or 1 when shared.

    Of all blocks together they are stacked: `[L, R, S, G, K]`.
    """

    keys: Array
    values: Array


class Source(NamedTuple):
    """What a stream sees of one source: mask and bias broadcast to `[R, H, Q, S]`."""

    key_values: KeyValues
    mask: Bool[Array, "#R 1 #Q S"] | None
    bias: Float[Array, "1 H Q S"] | None


def attend(
    query: Float[Array, "R Q H K"],
    sources: Sequence[Source],
    *,
    scale: float,
    dropout_rate: float = 0.0,
    key: Key[Array, ""] | None = None,
) -> Float[Array, "R Q H K"]:
    """`softmax([q·k of every source] * scale + bias) · [v of every source]`.

    Grouped-query attention where a source has fewer heads `G` than the query. The
    softmax is taken in float32.

    Args:
      query: queries of one stream.
      sources: all that they may look at.
      scale: multiplies the scores before the bias.
      dropout_rate: of the attention weights.
      key: for dropout; None for none.
    """
    groups = sources[0].key_values.keys.shape[-2]
    rows, length, heads, width = query.shape
    grouped = query.reshape(rows, length, groups, heads // groups, width)
    scores = [_scores(grouped, source, scale) for source in sources]
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
    weights = dropout(weights.astype(query.dtype), dropout_rate, key)
    bounds = np.cumsum([source.key_values.keys.shape[1] for source in sources])
    parts = jnp.split(weights, bounds[:-1].tolist(), axis=-1)
    mixed = [
        _weighted_values(part, source.key_values.values)
        for part, source in zip(parts, sources, strict=True)
    ]
    return functools.reduce(jnp.add, mixed).reshape(rows, length, heads, width)


def _scores(grouped: Array, source: Source, scale: float) -> Array:
    """Scores `[R, G, H/G, Q, S]` of one source, in float32."""
    keys = source.key_values.keys
    shared = keys.shape[0] == 1
    scores = jnp.einsum(
        "rqghk,sgk->rghqs" if shared else "rqghk,rsgk->rghqs",
        grouped,
        keys[0] if shared else keys,
        preferred_element_type=jnp.float32,
    )
    scores = scores * scale
    if source.bias is not None:
        bias = source.bias.astype(jnp.float32)
        scores = scores + bias.reshape(1, *scores.shape[1:3], *bias.shape[2:])
    if source.mask is not None:
        scores = jnp.where(source.mask[:, :, None], scores, MASKED)
    return scores


def _weighted_values(weights: Array, values: Array) -> Array:
    """Sums values `[R, S, G, K]` with weights `[R, G, H/G, Q, S]`."""
    if values.shape[0] == 1:
        return jnp.einsum("rghqs,sgk->rqghk", weights, values[0])
    return jnp.einsum("rghqs,rsgk->rqghk", weights, values)


def rotary_frequencies(config: ModelConfig) -> Float[np.ndarray, "half"]:
    """Angle per position of each pair in a head (Su et al. 2021, equation 15)."""
    width, scaling = config.head_width, config.rotary_scaling
    frequencies = config.rotary_base ** (-np.arange(0, width, 2) / width)
    if scaling is None:
        return frequencies
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    turns = scaling.original_positions * frequencies / (2 * np.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1) if high > low else 0.0
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rotary_angles(
    positions: Int[Array, "R Q"], config: ModelConfig
) -> tuple[Float[Array, "R Q 1 half"], Float[Array, "R Q 1 half"]]:
    """Cosines and sines of the rotary embedding (Su et al. 2021, equation 34)."""
    frequencies = rotary_frequencies(config)
    angles = positions[..., None, None] * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "R Q heads K"], angles: tuple[Array, Array]
) -> Float[Array, "R Q heads K"]:
    """Rotates the first half of each head against the second (Hugging Face layout)."""
    cosine, sine = angles
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cosine - second * sine, second * cosine + first * sine]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def relative_position_bucket(
    relative: Int[Array, "Q S"], *, bidirectional: bool, buckets: int, maximum: int
) -> Int[Array, "Q S"]:
    """T5's buckets of key position minus query position (Raffel et al. 2020, 2.1).

    Half the buckets are exact, the others grow logarithmically up to `maximum`; an
    encoder spends half of all on each sign.
    """
    offset = jnp.zeros_like(relative)
    if bidirectional:
        buckets //= 2
        offset = jnp.where(relative > 0, buckets, 0)
        distance = jnp.abs(relative)
    else:
        distance = jnp.maximum(-relative, 0)
    exact = buckets // 2
    ratio = jnp.log(jnp.maximum(distance, 1) / exact) / np.log(maximum / exact)
    far = exact + (ratio * (buckets - exact)).astype(jnp.int32)
    far = jnp.minimum(far, buckets - 1)
    return offset + jnp.where(distance < exact, distance, far)
