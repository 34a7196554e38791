"""The contract of a fused attention kernel in plain JAX, to compare kernels with.

It stores all scores, in float32. `python -m scripts.bench.gpu` compares the device's
kernel with it, and runs on it where there is no such device.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from prompt_tuning.models.fused_kernel import (
    FusedKernel,
    Keys,
    LogSumExp,
    Query,
    Segments,
)


def forward(
    query: Query,
    keys: Keys,
    values: Keys,
    segments: Segments,
    scale: float,
    causal: bool,
) -> tuple[Query, LogSumExp]:
    """Computes the output and the log-sum-exp; see `FusedKernel`."""
    scores = _scores(query, keys, segments, scale, causal)
    log_sum_exp = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - log_sum_exp[..., None])
    output = jnp.einsum("bhqs,bsk->bhqk", weights, values.astype(jnp.float32))
    return output.astype(query.dtype), log_sum_exp


def backward(
    query: Query,
    keys: Keys,
    values: Keys,
    segments: Segments,
    output: Query,
    log_sum_exp: LogSumExp,
    d_output: Query,
    scale: float,
    causal: bool,
) -> tuple[Query, Keys, Keys]:
    """Computes the gradients of query, keys and values; see `FusedKernel`."""
    wide = [x.astype(jnp.float32) for x in (query, keys, values, output, d_output)]
    q, k, v, o, do = wide
    scores = _scores(query, keys, segments, scale, causal)
    weights = jnp.exp(scores - log_sum_exp[..., None])  # [B, h, Q, S]
    d_weights = jnp.einsum("bhqk,bsk->bhqs", do, v) - jnp.sum(do * o, -1)[..., None]
    d_scores = weights * d_weights * scale
    return (
        jnp.einsum("bhqs,bsk->bhqk", d_scores, k).astype(query.dtype),
        jnp.einsum("bhqs,bhqk->bsk", d_scores, q).astype(keys.dtype),
        jnp.einsum("bhqs,bhqk->bsk", weights, do).astype(values.dtype),
    )


def _scores(query, keys, segments, scale, causal) -> Float[Array, "B h Q S"]:
    scores = jnp.einsum(
        "bhqk,bsk->bhqs", query, keys, preferred_element_type=jnp.float32
    )
    mask: Bool[Array, "#B 1 Q S"] = jnp.ones((1, 1, *scores.shape[2:]), bool)
    if causal:
        mask &= jnp.tri(*scores.shape[2:], dtype=bool)
    if segments is not None:
        mask &= (segments[:, :, None] == segments[:, None, :])[:, None]
    return jnp.where(mask, scores * scale, -jnp.inf)


KERNEL = FusedKernel(
    "plain JAX", forward, backward, packs=True, obstacle=lambda config: None
)
