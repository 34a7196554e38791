"""JAX's fused attention kernel for TPUs, splash attention.

Rows are padded to whole blocks; the padding is a separate segment, so no query attends
to it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as splash_mask,
)
from jaxtyping import Array, Int, Shaped

from prompt_tuning.core.private_parts import private_part
from prompt_tuning.models.fused_kernel import (
    FusedKernel,
    Keys,
    LogSumExp,
    Query,
    Segments,
    dtype_obstacle,
)

BLOCKS = (512, 256, 128)
"""Lengths of a block of queries or keys; head widths are multiples of the last."""
PADDING = -1


def forward(
    query: Query,
    keys: Keys,
    values: Keys,
    segments: Segments,
    scale: float,
    causal: bool,
    *,
    interpret: bool = False,
) -> tuple[Query, LogSumExp]:
    """Computes the output and the log-sum-exp; see `FusedKernel`."""
    _, heads, length, width = query.shape
    kernel = _kernel(heads, length, keys.shape[1], causal, interpret)
    attend = functools.partial(_with_sums, kernel)
    scaled = (query * scale).astype(query.dtype)
    output, log_sum_exp = jax.vmap(attend)(*_padded(scaled, keys, values, segments))
    return output[:, :, :length, :width], log_sum_exp[:, :, :length]


def _with_sums(kernel, query, keys, values, segments):
    output, (log_sum_exp,) = kernel(query, keys, values, segments)
    return output, log_sum_exp


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
    *,
    interpret: bool = False,
) -> tuple[Query, Keys, Keys]:
    """Computes the gradients of query, keys and values; see `FusedKernel`."""
    _, heads, length, width = query.shape
    key_count = keys.shape[1]
    kernel = _kernel(heads, length, key_count, causal, interpret)
    scaled = (query * scale).astype(query.dtype)
    rows = (
        *_padded(scaled, keys, values, segments),
        *(_pad_queries(x) for x in (output, d_output)),
        jnp.pad(log_sum_exp, [(0, 0), (0, 0), (0, _missing(length))]),
    )
    pull_back = functools.partial(_row_backward, kernel)
    d_query, d_keys, d_values = jax.vmap(pull_back)(*rows)
    d_query = (d_query[:, :, :length, :width] * scale).astype(query.dtype)
    return (
        d_query,
        d_keys[:, :key_count, :width].astype(keys.dtype),
        d_values[:, :key_count, :width].astype(values.dtype),
    )


def _row_backward(kernel, query, keys, values, segments, output, d_output, sums):
    """Calls the backward pass of JAX's own rule, with sums over all sources."""
    residuals = (query, keys, values, segments, None, output, sums)
    residuals += (kernel.dq_mask_info, kernel.dkv_mask_info)
    settings = kernel.kwargs | {"save_residuals": False}
    backward_pass = private_part(f"{splash.__name__}._splash_attention_bwd")
    gradients = backward_pass(**settings, res=residuals, do=d_output)
    return gradients[3:6]


@functools.cache
def _kernel(heads: int, length: int, keys: int, causal: bool, interpret: bool) -> Any:
    shape = (length + _missing(length), keys + _missing(keys))
    mask = splash_mask.CausalMask(shape) if causal else splash_mask.FullMask(shape)
    block_q, block_kv = (_block(size) for size in shape)
    with jax.ensure_compile_time_eval():
        return splash.make_splash_mqa(
            splash_mask.MultiHeadMask([mask] * heads),
            block_sizes=splash.BlockSizes(
                block_q=block_q,
                block_kv=block_kv,
                block_q_dkv=block_q,
                block_kv_dkv=block_kv,
                block_q_dq=block_q,
                block_kv_dq=block_kv,
            ),
            save_residuals=True,
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )


def _block(size: int) -> int:
    """Returns the longest block that divides a padded length."""
    return next(block for block in BLOCKS if size % block == 0)


def _missing(size: int) -> int:
    return -size % BLOCKS[-1]


def _padded(query: Query, keys: Keys, values: Keys, segments: Segments) -> Any:
    """Pads all arrays to whole blocks, and numbers each row's segments."""
    batch, _, length, _ = query.shape
    key_count = keys.shape[1]
    if segments is None:
        of_queries = jnp.zeros((batch, length), jnp.int32)
        of_keys = jnp.zeros((batch, key_count), jnp.int32)
    else:
        of_queries = of_keys = segments
    numbers = splash.SegmentIds(_pad_segments(of_queries), _pad_segments(of_keys))
    return _pad_queries(query), _pad_keys(keys), _pad_keys(values), numbers


def _pad_segments(segments: Int[Array, "B S"]) -> Int[Array, "B _"]:
    missing = _missing(segments.shape[1])
    return jnp.pad(segments, [(0, 0), (0, missing)], constant_values=PADDING)


def _pad_queries(x: Query) -> Shaped[Array, "B h _ _"]:
    return jnp.pad(x, [(0, 0), (0, 0), *((0, _missing(n)) for n in x.shape[2:])])


def _pad_keys(x: Keys) -> Shaped[Array, "B _ _"]:
    return jnp.pad(x, [(0, 0), *((0, _missing(n)) for n in x.shape[1:])])


KERNEL = FusedKernel(
    "splash attention", forward, backward, packs=True, obstacle=dtype_obstacle
)
