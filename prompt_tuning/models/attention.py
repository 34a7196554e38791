"""Attention over a list of key/value sources, with a hand-written backward pass.

A query may attend to keys of its own row, to keys that rows share (a prompt), and to
earlier keys (a cache). `attend` takes these as a list of sources and normalizes over
all of them together, so a shared source is never copied per row.

Automatic differentiation of softmax would store its input and its output and sum over
all scores again. Here the scores are exponentiated once and never divided: the division
is applied to the output, which is `S / K` times smaller, and the sum that the backward
pass needs runs over `K` numbers instead of `S` (Dao et al. 2022, appendix B.2).

Shapes: `R` rows of queries with `Q` positions; `N` rows of keys, each shared by `r = R
/ N` rows of queries; `H` query heads and `G` key/value heads, each shared by `h = H /
G` query heads. Queries are `[G, R, h, Q, K]`, keys and values `[G, N, S, K]`, and
scores `[G, N, r, h, Q, S]`. This order makes every product a batched matrix product of
operands as they lie in memory, because queries that attend to the same keys are
adjacent, whether the source is shared or not. The price is one rearrangement of
positions per block (`groups_first`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from prompt_tuning.core.dropout import DropoutIndex, dropout
from prompt_tuning.core.masks import CausalMask
from prompt_tuning.core.parameters import optional_key
from prompt_tuning.models.attention_products import (
    bias_gradient,
    bias_of_scores,
    key_query_products,
    over_keys,
    query_key_products,
    sum_over_keys,
    sum_over_queries,
)
from prompt_tuning.sharding import collectives

# Finite, so that a fully masked row (padding) yields numbers instead of NaN.
MASKED_SCORE = -1e10

MAXIMUM_QUERIES = 512
"""Maximum number of positions whose scores are in memory at once.

The scores of longer rows are computed block by block, and again in the backward pass:
storing them would take memory that grows with the square of the length.
"""


class KeyValues(NamedTuple):
    """Keys and values of one source: `[G, R, S, K]`, or `[G, N, S, K]` if shared.

    Each row of a shared source serves `R / N` consecutive rows of queries; e.g. with `N
    = 1` it serves all of them. For all blocks together there is a leading axis `L`.

    Compressed ones are narrower (see `latent_attention`): `G` is 1, and the values are
    also the last elements of the keys.
    """

    keys: Array
    values: Array

    @classmethod
    def from_heads(
        cls, keys: Float[Array, "R S G K"], values: Float[Array, "R S G V"]
    ) -> "KeyValues":
        """Rearranges the heads of all positions, as attention reads them."""
        return cls(keys.transpose(2, 0, 1, 3), values.transpose(2, 0, 1, 3))

    @property
    def groups(self) -> int:
        """Number of key/value heads `G`."""
        return self.keys.shape[-4]


class AttentionSource(NamedTuple):
    """Keys and values, with the mask and bias for the scores against them.

    Mask and bias broadcast to `[R, H, Q, S]`. Only fused kernels accept a `CausalMask`.
    """

    key_values: KeyValues
    mask: Bool[Array, "#R 1 #Q S"] | CausalMask | None
    bias: Float[Array, "#R H Q S"] | None

    @property
    def mask_array(self) -> Bool[Array, "#R 1 #Q S"] | None:
        """Mask as an array; only fused kernels may leave it a `CausalMask`."""
        assert not isinstance(self.mask, CausalMask)
        return self.mask


def groups_first(
    x: Shaped[Array, "R S _ K"], groups: int
) -> Shaped[Array, "G R _ S K"]:
    """Rearranges heads `[R, S, G * h, K]` for attention, to `[G, R, h, S, K]`."""
    rows, length, heads, width = x.shape
    x = x.reshape(rows, length, groups, heads // groups, width)
    return x.transpose(2, 0, 3, 1, 4)


def positions_first(x: Shaped[Array, "G R h S K"]) -> Shaped[Array, "R S _ K"]:
    """Inverts `groups_first`."""
    groups, rows, heads, length, width = x.shape
    return x.transpose(1, 3, 0, 2, 4).reshape(rows, length, groups * heads, width)


def attend(
    query: Float[Array, "G R h Q K"],
    sources: Sequence[AttentionSource],
    *,
    scale: float,
    soft_cap: float | None = None,
    dropout_rate: float | int = 0.0,
    key: Key[Array, ""] | None = None,
    first_row: Int[Array, ""] | int = 0,
) -> Float[Array, "G R h Q K"]:
    """Computes `softmax([q·k of every source] * scale + bias) · [v of every source]`.

    The softmax runs in float32. A source with fewer heads `G` than the query gives
    grouped-query attention. A query whose keys are all masked gets the mean of the
    masked values; ignore its gradient.

    Args:
      query: queries of one stream.
      sources: keys and values to attend to.
      scale: multiplies the scores, before the bias.
      soft_cap: bound `c` on the scaled scores, which become `c * tanh(scores / c)`
        before the bias (Gemma Team 2024, "Gemma 2", section 2); None for no bound.
      dropout_rate: dropout rate of the attention weights.
      key: random key for dropout; None disables dropout.
      first_row: index of the first row within the whole batch, so that a mesh draws the
        same dropout as one device.
    """
    keys = [optional_key(key, f"source_{i}") for i in range(len(sources))]
    draws = None
    if key is not None:
        draws = _DropoutDraws(tuple(keys), _head_numbers(query, first_row), 0)
    run = functools.partial(_attend, ScoreSettings(scale, soft_cap), dropout_rate)
    if query.shape[3] <= MAXIMUM_QUERIES:
        return run(query, tuple(sources), draws)
    return _attend_by_blocks(run, query, tuple(sources), draws)


def attend_with_sums(
    query: Float[Array, "G R h Q K"],
    sources: Sequence[AttentionSource],
    settings: "ScoreSettings",
) -> tuple[Float[Array, "G R h Q V"], Float[Array, "G R h Q"]]:
    """Computes `attend`, also of compressed sources, and the logarithms of the sums.

    Args:
      query: queries of one stream, as wide as keys and values together if compressed.
      sources: keys and values that the queries attend to, all of one form.
      settings: see `attend`.

    Returns:
      the weighted means of the values, and the logarithm of each softmax denominator.
    """
    output, logarithms, _ = _forward(settings, 0.0, query, tuple(sources), None)
    return output, logarithms


def attention_weights(
    query: Float[Array, "G R h Q K"],
    sources: Sequence[AttentionSource],
    settings: "ScoreSettings",
) -> Float[Array, "R Q _"]:
    """Computes the weights of all keys, averaged over heads, in the sources' order.

    Unlike `attend`, this holds the scores of all queries and keys in memory.
    """
    by_query = query.shape[:-1]  # [G, R, h, Q]
    scores = [_scores(query, source, settings)[0] for source in sources]
    # Of each source, [G, N, r, h, Q, S] -> [G, R, h, Q, S]
    joined = jnp.concatenate([s.reshape(*by_query, -1) for s in scores], axis=-1)
    return jax.nn.softmax(joined, axis=-1).mean((0, 2))


class ScoreSettings(NamedTuple):
    """Scale and soft cap of the scores; see `attend`."""

    scale: float
    soft_cap: float | None


class _DropoutDraws(NamedTuple):
    """Random inputs of attention dropout.

    Attributes:
      keys: one random key per source.
      heads: index of each row's heads in the whole batch, `[R, H]`.
      first_query: position of the first query.
    """

    keys: tuple[Any, ...]
    heads: Any
    first_query: Any


def _attend_by_blocks(
    run: Callable[..., Array],
    query: Float[Array, "G R h Q K"],
    sources: tuple[AttentionSource, ...],
    draws: _DropoutDraws | None,
) -> Float[Array, "G R h Q K"]:
    """Runs attention block by block over the queries, without storing scores."""
    length = query.shape[3]
    blocks = -(-length // MAXIMUM_QUERIES)
    size = -(-length // blocks)

    def split(x: Array, axis: int) -> Array:
        """Splits an axis over `Q`, padded, into blocks on a new leading axis."""
        padding = [(0, 0)] * x.ndim
        padding[axis] = (0, blocks * size - length)
        shape = (*x.shape[:axis], blocks, size, *x.shape[axis + 1 :])
        return jnp.moveaxis(jnp.pad(x, padding).reshape(shape), axis, 0)

    # Masks and biases that differ by query, one tuple for each source.
    by_query = tuple(
        tuple(
            None if x is None or x.shape[2] == 1 else split(x, 2)
            for x in (source.mask_array, source.bias)
        )
        for source in sources
    )

    @jax.checkpoint
    def run_block(block):
        number, part, masks_and_biases = block
        of_block = tuple(
            source._replace(
                mask=source.mask if mask is None else mask,
                bias=source.bias if bias is None else bias,
            )
            for source, (mask, bias) in zip(sources, masks_and_biases, strict=True)
        )
        inputs = draws and draws._replace(first_query=number * size)
        return run(part, of_block, inputs)

    # [blocks, G, R, h, size, K]
    attended = jax.lax.map(run_block, (jnp.arange(blocks), split(query, 3), by_query))
    joined = jnp.moveaxis(attended, 0, 3).reshape(*query.shape[:3], -1, query.shape[4])
    return joined[:, :, :, :length]


def _head_numbers(query: Array, first_row: Array | int) -> Int[Array, "R H"]:
    """Numbers the (row, head) pairs of the whole batch, so a mesh drops the same."""
    groups, rows, in_group, _, _ = query.shape
    heads = groups * in_group
    first, total = collectives.head_range(heads)
    row = first_row + jnp.arange(rows)  # [R]
    return row[:, None] * total + first + jnp.arange(heads)  # [R, H]


def _drop_weights(
    e: Array, rate: float | int, draws: _DropoutDraws | None, source: int
) -> Array:
    """Applies dropout to one source's weights, `[G, N, r, h, Q, S]`."""
    if draws is None or rate == 0.0:
        return e
    groups, n, rows, heads, query_count, key_count = e.shape
    # [R, H] -> [N, r, G, h] -> [G, N, r, h]
    number = draws.heads.reshape(n, rows, groups, heads).transpose(2, 0, 1, 3)
    # [Q, S]: number of each score within its head.
    queries = draws.first_query + jnp.arange(query_count)
    within = queries[:, None] * key_count + jnp.arange(key_count)
    index = DropoutIndex(number[..., None, None], within)
    return dropout(e, rate, draws.keys[source], index)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(settings, rate, query, sources, draws):
    return _forward(settings, rate, query, sources, draws)[0]


def _forward(settings, rate, query, sources, draws):
    """Computes the output, log-sums of the softmax, and residuals."""
    by_query = query.shape[:-1]  # [G, R, h, Q]
    # Of each source, [G, N, r, h, Q, S] with its own N and S.
    scores, slopes = zip(
        *(_scores(query, source, settings) for source in sources), strict=True
    )
    # [G, R, h, Q]: the maximum over the keys of all sources.
    highest = functools.reduce(
        jnp.maximum, [s.max(-1).reshape(by_query) for s in scores]
    )
    exponentials = [
        jnp.exp(s - over_keys(highest, s)).astype(query.dtype) for s in scores
    ]
    totals = [e.sum(-1, dtype=jnp.float32).reshape(by_query) for e in exponentials]
    total = functools.reduce(jnp.add, totals)
    # [G, R, h, Q, 1]: one over the softmax denominator.
    inverse = (1 / total)[..., None]
    # Of each source, [G, R, h, Q, K], not yet divided by the denominator.
    weighted_values = [
        sum_over_keys(_drop_weights(e, rate, draws, i), source.key_values.values, query)
        for i, (e, source) in enumerate(zip(exponentials, sources, strict=True))
    ]
    summed = functools.reduce(jnp.add, weighted_values)
    output = (summed * inverse).astype(query.dtype)  # [G, R, h, Q, K]
    residuals = query, sources, draws, exponentials, slopes, inverse, output
    return output, highest + jnp.log(total), residuals


def _forward_rule(settings, rate, query, sources, draws):
    # The gradient of a frozen bias is skipped: it would be a sum over all rows.
    trains_bias = tuple(s.bias is not None and s.bias.perturbed for s in sources)
    values = jax.tree.map(
        lambda primal: primal.value,
        (query, sources, draws),
        is_leaf=lambda x: isinstance(x, jax.custom_derivatives.CustomVJPPrimal),
    )
    output, _, residuals = _forward(settings, rate, *values)
    return output, (residuals, trains_bias)


def _backward_rule(settings, rate, residuals, cotangent):
    saved, trains_bias = residuals
    query, sources, draws, exponentials, slopes, inverse, output = saved
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return None, None, None
    # With p = e * inverse and output o = p·v, softmax passes back to each score
    #   ds = p * (do·v - do·o) = e * (weighted·v - weighted·o).
    weighted = cotangent.astype(jnp.float32) * inverse  # [G, R, h, Q, K]
    # weighted·o is the same for all keys of a query: [G, R, h, Q].
    # XLA computes this sum of products on CPUs up to 40 times faster as a `dot`.
    shared = jnp.einsum("grhqk,grhqk->grhq", weighted, output.astype(jnp.float32))
    weighted = weighted.astype(query.dtype)
    drop = [
        functools.partial(_drop_weights, rate=rate, draws=draws, source=i)
        for i in range(len(sources))
    ]
    gradients = [
        _source_backward(settings.scale, query, weighted, shared, *source)
        for source in zip(sources, drop, exponentials, slopes, trains_bias, strict=True)
    ]
    d_query = functools.reduce(jnp.add, [d_query for d_query, _ in gradients])
    return d_query, tuple(d_source for _, d_source in gradients), None


def _source_backward(
    scale, query, weighted, shared, source, drop, e, slope, trains_bias
):
    """Computes the gradients of the query and of one source."""
    keys, values = source.key_values  # [G, N, S, K] each
    # The forward pass dropped the weights; the same mask drops their gradient.
    d_weight = drop(query_key_products(weighted, values))  # [G, N, r, h, Q, S]
    d_score = e * (d_weight - over_keys(shared, e))
    d_bias = None
    if trains_bias:
        # The bias is added after scaling, so its gradient is taken before it.
        d_bias = bias_gradient(d_score, source.bias)
    if slope is not None:
        d_score = d_score * slope
    d_score = (d_score * scale).astype(query.dtype)
    d_key_values = KeyValues(
        sum_over_queries(d_score, query, keys),
        sum_over_queries(drop(e), weighted, values),
    )
    d_query = sum_over_keys(d_score, keys, query).astype(query.dtype)
    return d_query, AttentionSource(d_key_values, None, d_bias)


_attend.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def _scores(
    query: Array, source: AttentionSource, settings: ScoreSettings
) -> tuple[Array, Array | None]:
    """Computes the masked scores of one source, `[G, N, r, h, Q, S]`, in float32.

    Also returns the derivative of the soft cap at each score; None without a soft cap.
    """
    keys, values = source.key_values
    if (width := keys.shape[-1]) == query.shape[-1]:
        products = query_key_products(query, keys)
    else:  # compressed: the values are the other elements of the keys
        products = key_query_products(query[..., :width], keys)
        products += key_query_products(query[..., width:], values)
    scores = products * settings.scale
    slope = None
    if settings.soft_cap is not None:
        bounded = jnp.tanh(scores / settings.soft_cap)
        scores = settings.soft_cap * bounded
        # d tanh(x) / dx = 1 - tanh(x)**2
        slope = (1 - bounded * bounded).astype(query.dtype)
    if source.bias is not None:
        scores = scores + bias_of_scores(source.bias.astype(jnp.float32), scores)
    mask = source.mask_array
    if mask is not None:
        rows = (1, 1) if len(mask) == 1 else scores.shape[1:3]
        # [1 or R, 1, 1 or Q, S] -> [1 or N, 1 or r, 1, 1 or Q, S]
        scores = jnp.where(mask.reshape(*rows, *mask.shape[1:]), scores, MASKED_SCORE)
    return scores, slope
