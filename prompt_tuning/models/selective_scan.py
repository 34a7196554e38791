"""Mamba's selective scan: channels whose memory decays at a separate rate per number.

Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces",
algorithm 2. Each of `H` channels has a memory `S` of `K` numbers, which decay at the
channel's rates `A`. All channels share a position's query `q` (there `C`) and key `k`
(`B`). Position `t` with a channel's value `v` (`x`) and step `d` computes

    S_t = exp(d_t * A) * S_{t-1} + d_t * v_t * k_t
    o_t = S_t . q_t

Since each number decays at its own rate, a chunk cannot be computed as a matrix
product, so `chunked_scan` loops over positions, too. Its backward pass keeps the memory
at the start of each chunk and recomputes the rest (section 3.3.2 there), which was 10
times as fast on a CPU as a parallel scan. Both functions compute in float32.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from prompt_tuning.models.memory_chunks import run_chunks, run_positions

CHUNK = 16
"""Positions between two memories that a backward pass keeps."""


class ScanInputs(NamedTuple):
    """Inputs of the rule: `[R, T, ...]` for rows, or `[n, ...]` for all positions.

    Attributes:
      query: `[R, T, K]`.
      key: `[R, T, K]`.
      value: `[R, T, H, 1]`.
      step: `[R, T, H]`; a position with step 0 leaves the memory unchanged.
    """

    query: Float[Array, "*lead K"]
    key: Float[Array, "*lead K"]
    value: Float[Array, "*lead H 1"]
    step: Float[Array, "*lead H"]


def recurrent_scan(
    inputs: ScanInputs, memory: Float[Array, "R H K 1"], rates: Float[Array, "H K"]
) -> tuple[Float[Array, "R T H 1"], Float[Array, "R H K 1"]]:
    """Computes the rule position by position; returns the output and last memory."""
    return run_positions(functools.partial(_step, rates), inputs, memory)


def chunked_scan(
    inputs: ScanInputs,
    starts: Float[Array, "R n H K 1"],
    segments: Int[Array, "R T"] | None,
    rates: Float[Array, "H K"],
    *,
    chunk: int = CHUNK,
) -> tuple[Float[Array, "R T H 1"], Float[Array, "R H K 1"]]:
    """Computes the rule chunk by chunk; takes the other arguments of `run_chunks`."""
    return run_chunks(_run_chunk, inputs, starts, segments, chunk, (rates,))


def _run_chunk(inputs, memory, examples, rates):
    """Computes one chunk; see `memory_chunks.Rule`."""
    new = None
    if examples.continues is not None:
        # The first position of an example continues what the example begins with.
        alike = jnp.diagonal(examples.together, -1, 1, 2)  # [R, C - 1]
        first = jnp.concatenate([~examples.continues[:, :1], ~alike], axis=1)
        new = first.T, examples.base.swapaxes(0, 1)  # [C, R] and [C, R, n]

    def step(memory, position):
        inputs, new = position
        if new is not None:
            begun = jnp.einsum("rnhkv,rn->rhkv", examples.starts, new[1])
            memory = jnp.where(new[0][:, None, None, None], begun, memory)
        return _step(rates, memory, inputs)

    by_position = ScanInputs(*(jnp.moveaxis(x, 2, 0) for x in inputs))
    memory, output = jax.lax.scan(step, memory, (by_position, new))
    return jnp.moveaxis(output, 0, 2), memory


def _step(rates, memory, position):
    """Computes one position; see `memory_chunks.Step`."""
    query, key, value, step = position
    added = (step * value[..., 0])[..., None] * key[:, None]  # [R, H, K]
    memory = memory[..., 0] * jnp.exp(step[..., None] * rates) + added
    output = (memory * query[:, None]).sum(-1)  # faster than a product of matrices
    return memory[..., None], output[..., None]
