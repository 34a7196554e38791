"""Attention with a fused kernel, over shared prompts and each row's own text.

All rows that attend to a shared source form one long query against it: in the layout of
`attention` they are adjacent, so nothing is copied, and the kernel sums the gradient of
the shared keys over all rows. Each source takes one kernel call. With `l_i` the
log-sum-exp of source `i` and `o_i` its output,

    l = logsumexp_i(l_i),    o = sum_i exp(l_i - l) o_i

is the attention to all sources together (Milakov and Gimelshein 2018, section 3). The
backward pass is one rule over all sources. For each score, `ds = exp(s - l) (do·v -
do·o)` depends on other sources only through `l` and `o`, so each kernel's own backward
pass gets these instead of `l_i` and `o_i`. Differentiating the merge itself would need
the gradient of `l_i`, which kernels silently drop.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from prompt_tuning.core.masks import CausalMask
from prompt_tuning.core.recomputation import ATTENTION, named
from prompt_tuning.models.attention import AttentionSource, KeyValues
from prompt_tuning.models.fused_kernel import FusedKernel, folding_batches


def attend_fused(
    kernel: FusedKernel,
    query: Float[Array, "G R h Q K"],
    sources: Sequence[AttentionSource],
    *,
    scale: float,
) -> Float[Array, "G R h Q K"]:
    """Computes the same as `attention.attend`, with a fused kernel.

    `sources` are first the shared keys and values, `[G, 1, S, K]`, without a mask, and
    last the rows' own, with a `CausalMask`. `scale` multiplies the scores.
    """
    causal = sources[-1].mask
    assert isinstance(causal, CausalMask)  # other sources are for `attention.attend`
    key_values = tuple(source.key_values for source in sources)
    return _attend(kernel, scale, query, key_values, causal.segments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(kernel, scale, query, key_values, segments):
    return _forward(kernel, scale, query, key_values, segments)[0]


def _forward(kernel, scale, query, key_values, segments):
    """Computes the output and the residuals for the backward pass."""
    outputs, sums = [], []
    for i, source in enumerate(key_values):
        causal = i == len(key_values) - 1
        run = folding_batches(kernel.forward, scale, causal)
        arrays = _batch_of(query, source, segments, causal)
        output, log_sum_exp = run(*arrays)
        outputs.append(output.reshape(query.shape))
        sums.append(log_sum_exp.reshape(query.shape[:-1]))  # [G, R, h, Q]
    total = functools.reduce(jnp.logaddexp, sums)
    output = outputs[0]
    if len(outputs) > 1:
        weighted = [
            jnp.exp(part - total)[..., None] * out.astype(jnp.float32)
            for part, out in zip(sums, outputs, strict=True)
        ]
        output = functools.reduce(jnp.add, weighted).astype(query.dtype)
    # One name: saving only the output would repeat the kernel for the sums.
    output, total = named(output, ATTENTION), named(total, ATTENTION)
    return output, (query, key_values, segments, output, total)


def _backward(kernel, scale, residuals, d_output):
    query, key_values, segments, output, total = residuals
    d_query, d_key_values = [], []
    for i, source in enumerate(key_values):
        causal = i == len(key_values) - 1
        run = folding_batches(kernel.backward, scale, causal)
        folded = _batch_of(query, source, segments, causal)
        shape = folded[0].shape
        d_folded, d_keys, d_values = run(
            *folded,
            output.reshape(shape),
            total.reshape(shape[:-1]),
            d_output.reshape(shape),
        )
        d_query.append(d_folded.reshape(query.shape))
        d_key_values.append(
            KeyValues(*(d.reshape(source.keys.shape) for d in (d_keys, d_values)))
        )
    summed = d_query[0]
    if len(d_query) > 1:
        summed = functools.reduce(jnp.add, [d.astype(jnp.float32) for d in d_query])
    return summed.astype(query.dtype), tuple(d_key_values), None


_attend.defvjp(_forward, _backward)


def _batch_of(query, source, segments, causal):
    """Reshapes queries, keys and values as a kernel reads them.

    Heads and rows that share keys become one long query, `[G, 1, R * h * Q, K]`; with
    keys of their own, rows are batch entries, `[G * R, h, Q, K]`.
    """
    groups, rows, heads, length, width = query.shape
    if not causal:
        long = query.reshape(groups, 1, rows * heads * length, width)
        return long, source.keys[:, 0], source.values[:, 0], None
    keys, values = (x.reshape(groups * rows, -1, width) for x in source)
    if segments is not None:
        shape = (groups, rows, length)
        segments = jnp.broadcast_to(segments, shape).reshape(-1, length)
    by_row = query.reshape(groups * rows, heads, length, width)
    return by_row, keys, values, segments
