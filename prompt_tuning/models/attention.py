"""Attention over several sources of keys, with a backward pass of its own.

A query may look at keys that were computed for its row alone, for many rows at once (a
shared prompt) or earlier (a cache). `attend` takes them as a list of sources and
normalises over all of them at once; a source shared by rows is never copied.

Left to automatic differentiation, softmax keeps its output beside its input and passes
over all scores once more for a sum. Here the scores are exponentiated once and never
divided: the division is done on the outcome, which is `S / K` times smaller, and the
sum that the backward pass needs is one over `K` numbers (Dao et al. 2022, appendix
B.2).
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from prompt_tuning.core.dropout import DropoutIndex, dropout
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import optional_key
from prompt_tuning.sharding import collectives

# Finite, so that a row that sees nothing (padding) gives numbers and not NaN.
MASKED_SCORE = -1e10


class KeyValues(NamedTuple):
    """Keys and values `[R, S, G, K]` of one source, or `[N, S, G, K]` when shared.

    A shared source has `R / N` rows of queries for each of its own, one after the
    other; `N = 1` is shared by all. Of all blocks together they are stacked, on `L`.
    """

    keys: Array
    values: Array


class AttentionSource(NamedTuple):
    """What a stream sees of one source: mask and bias broadcast to `[R, H, Q, S]`."""

    key_values: KeyValues
    mask: Bool[Array, "#R 1 #Q S"] | None
    bias: Float[Array, "#R H Q S"] | None


def attend(
    query: Float[Array, "R Q H K"],
    sources: Sequence[AttentionSource],
    *,
    scale: float,
    dropout_rate: float = 0.0,
    key: Key[Array, ""] | None = None,
    first_row: Int[Array, ""] | int = 0,
) -> Float[Array, "R Q H K"]:
    """`softmax([q·k of every source] * scale + bias) · [v of every source]`.

    Grouped-query attention where a source has fewer heads `G` than the query. The
    softmax is taken in float32. A row that sees nothing at all gives the mean of what
    it does not see, and its gradient means nothing.

    Args:
      query: queries of one stream.
      sources: all that they may look at.
      scale: multiplies the scores before the bias.
      dropout_rate: of the attention weights.
      key: for dropout; None for none.
      first_row: the number of the first of these rows in the whole batch.
    """
    keys = [optional_key(key, f"source_{i}") for i in range(len(sources))]
    draws = None
    if key is not None:
        draws = _DropoutDraws(tuple(keys), _head_numbers(query, first_row))
    return _attend(scale, dropout_rate, query, tuple(sources), draws)


class _DropoutDraws(NamedTuple):
    """What attention weights are dropped by.

    Attributes:
      keys: of each source.
      heads: the number of each row's heads in the whole batch, `[R, H]`.
    """

    keys: tuple[Any, ...]
    heads: Any


def _head_numbers(query: Array, first_row: Array | int) -> Int[Array, "R H"]:
    rows, _, heads, _ = query.shape
    first, total = collectives.head_range(heads)
    row = first_row + jnp.arange(rows)
    return row[:, None] * total + first + jnp.arange(heads)


def _drop_weights(
    e: Array, rate: float, draws: _DropoutDraws | None, source: int
) -> Array:
    """Weights `[N, G, R/N, h, Q, S]` of a source after dropout."""
    if draws is None or rate == 0.0:
        return e
    n, groups, rows, heads, length, seen = e.shape
    number = draws.heads.reshape(n, rows, groups, heads).transpose(0, 2, 1, 3)
    within = jnp.arange(length)[:, None] * seen + jnp.arange(seen)
    places = DropoutIndex(number[..., None, None], within)
    return dropout(e, rate, draws.keys[source], places)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(scale, rate, query, sources, draws):
    return _forward(scale, rate, query, sources, draws)[0]


def _forward(scale, rate, query, sources, draws):
    """The outcome, and of each source the exponentials `[N, G, R/N, h, Q, S]`."""
    scores = [_scores(query, source, scale) for source in sources]
    highest = functools.reduce(
        jnp.maximum, [_to_query_layout(s.max(-1), query) for s in scores]
    )
    exponentials = [
        jnp.exp(s - _to_source_layout(highest, s.shape)[..., None]).astype(query.dtype)
        for s in scores
    ]
    totals = [
        _to_query_layout(e.sum(-1, dtype=jnp.float32), query) for e in exponentials
    ]
    inverse = (1 / functools.reduce(jnp.add, totals))[..., None]
    mixed = [
        _sum_over_keys(
            _drop_weights(e, rate, draws, i), source.key_values.values, query
        )
        for i, (e, source) in enumerate(zip(exponentials, sources, strict=True))
    ]
    outcome = (functools.reduce(jnp.add, mixed) * inverse).astype(query.dtype)
    return outcome, (query, sources, draws, exponentials, inverse, outcome)


def _forward_rule(scale, rate, query, sources, draws):
    # A frozen bias wants no gradient, which would be a sum over all rows.
    biased = tuple(s.bias is not None and s.bias.perturbed for s in sources)
    values = jax.tree.map(
        lambda primal: primal.value,
        (query, sources, draws),
        is_leaf=lambda x: isinstance(x, jax.custom_derivatives.CustomVJPPrimal),
    )
    outcome, kept = _forward(scale, rate, *values)
    return outcome, (kept, biased)


def _backward_rule(scale, rate, residuals, cotangent):
    (query, sources, draws, exponentials, inverse, outcome), biased = residuals
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return None, None, None
    weighted = cotangent.astype(jnp.float32) * inverse
    shared = jnp.sum(weighted * outcome.astype(jnp.float32), axis=-1)
    weighted = weighted.astype(query.dtype)
    drop = [
        functools.partial(_drop_weights, rate=rate, draws=draws, source=i)
        for i in range(len(sources))
    ]
    back = [
        _source_backward(scale, query, weighted, shared, *source)
        for source in zip(sources, drop, exponentials, biased, strict=True)
    ]
    d_query = functools.reduce(jnp.add, [part[0] for part in back])
    return d_query, tuple(part[1] for part in back), None


def _source_backward(scale, query, weighted, shared, source, drop, e, biased):
    """What one source passes back: to the query, and to itself."""
    keys, values = source.key_values
    d_weight = drop(_query_key_products(weighted, values))
    d_score = e * (d_weight - _to_source_layout(shared, e.shape)[..., None])
    d_bias = None
    if biased:
        d_bias = _bias_gradient(d_score, source.bias)
    d_score = (d_score * scale).astype(query.dtype)
    made = KeyValues(
        _sum_over_queries(d_score, query, keys),
        _sum_over_queries(drop(e), weighted, values),
    )
    return _sum_over_keys(d_score, keys, query).astype(query.dtype), AttentionSource(
        made, None, d_bias
    )


_attend.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def _scores(query: Array, source: AttentionSource, scale: float) -> Array:
    """Masked scores `[N, G, R/N, h, Q, S]` of one source, in float32."""
    scores = _query_key_products(query, source.key_values.keys) * scale
    if source.bias is not None:
        scores = scores + _bias_of_scores(source.bias.astype(jnp.float32), scores)
    if source.mask is not None:
        mask = source.mask
        rows = (1, 1) if len(mask) == 1 else (scores.shape[0], scores.shape[2])
        mask = mask.reshape(rows[0], 1, rows[1], 1, *mask.shape[2:])
        scores = jnp.where(mask, scores, MASKED_SCORE)
    return scores


def _bias_of_scores(bias: Array, scores: Array) -> Array:
    """A bias `[1 or R, H, Q, S]` as scores `[N, G, R/N, h, Q, S]` have it."""
    n, groups, rows, heads, *_ = scores.shape
    lead = (1, 1) if len(bias) == 1 else (n, rows)
    split = bias.reshape(*lead, groups, heads, *bias.shape[2:])
    return jnp.moveaxis(split, 1, 2)


def _bias_gradient(d_score: Array, bias: Array) -> Array:
    """The gradient of a bias, by rows if it is given by rows."""
    by_rows = jnp.moveaxis(d_score, 2, 1)
    if len(bias) == 1:
        by_rows = by_rows.sum((0, 1))
    return by_rows.reshape(bias.shape).astype(bias.dtype)


def _group_queries(query: Array, keys: Array) -> Array:
    """Queries `[R, Q, H, K]` as `[N, R/N, Q, G, h, K]`, for the keys of a source."""
    rows, length, heads, width = query.shape
    n, groups = keys.shape[0], keys.shape[2]
    check_groups(rows, n)
    return query.reshape(n, rows // n, length, groups, heads // groups, width)


def check_groups(rows: int, n: int) -> None:
    """Refuses rows that cannot be grouped evenly by `n` prompts.

    Raises:
      ValueError: with both numbers.
    """
    if rows % n:
        raise ValueError(
            f"{rows} rows cannot be grouped evenly by {n} prompts; say in "
            "Batch.prompt_ids which prompt each row has"
        )


def _query_key_products(query: Array, keys: Array) -> Array:
    """The product of every query with every key, `[N, G, R/N, h, Q, S]`, in float32."""
    return jnp.einsum(
        "nrqghk,nsgk->ngrhqs",
        _group_queries(query, keys),
        keys,
        preferred_element_type=jnp.float32,
    )


def _sum_over_keys(weights: Array, values: Array, query: Array) -> Array:
    """Values summed over keys with weights `[N, G, R/N, h, Q, S]`, for each query."""
    mixed = jnp.einsum(
        "ngrhqs,nsgk->nrqghk", weights, values, preferred_element_type=jnp.float32
    )
    return mixed.reshape(query.shape)


def _sum_over_queries(weights: Array, query: Array, keys: Array) -> Array:
    """Queries summed over queries with weights `[N, G, R/N, h, Q, S]`, for each key."""
    gathered = jnp.einsum(
        "ngrhqs,nrqghk->nsgk",
        weights,
        _group_queries(query, keys),
        preferred_element_type=jnp.float32,
    )
    return gathered.astype(keys.dtype)


def _to_query_layout(x: Array, query: Array) -> Array:
    """One number for each query, from `[N, G, R/N, h, Q]` to `[R, Q, H]`."""
    return x.transpose(0, 2, 4, 1, 3).reshape(query.shape[:3])


def _to_source_layout(x: Array, shape: tuple[int, ...]) -> Array:
    """The inverse of `_by_row`, for scores of a shape `[N, G, R/N, h, Q, S]`."""
    n, groups, rows, heads, length = shape[:5]
    return x.reshape(n, rows, length, groups, heads).transpose(0, 3, 1, 4, 2)


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
    positions: Int[Array, "n"], config: ModelConfig
) -> tuple[Float[Array, "n 1 half"], Float[Array, "n 1 half"]]:
    """Cosines and sines of the rotary embedding (Su et al. 2021, equation 34)."""
    frequencies = rotary_frequencies(config)
    angles = positions[..., None, None] * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "n heads K"], angles: tuple[Array, Array]
) -> Float[Array, "n heads K"]:
    """Rotates the first half of each head against the second (Hugging Face layout)."""
    cosine, sine = angles
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cosine - second * sine, second * cosine + first * sine]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def relative_position_bucket(
    relative: Int[Array, "*lead"], *, bidirectional: bool, buckets: int, maximum: int
) -> Int[Array, "*lead"]:
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
