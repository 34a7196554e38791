"""The selective scan of Mamba: memories of channels, whose numbers decay at own rates.

Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces",
algorithm 2. Each of `H` channels has a memory `S` of `K` numbers, which decay at the
channel's rates `A`. All channels share a position's query `q` (there `C`) and key `k`
(`B`). Position `t` with a channel's value `v` (`x`) and step `d` computes

    S_t = exp(d_t * A) * S_{t-1} + d_t * v_t * k_t
    o_t = S_t . q_t

Each number decays by a factor of its own, so no product of matrices computes a chunk.
`chunked_scan` joins the changes of neighbors, then those of pairs, and so on (Blelloch
1990, "Prefix Sums and Their Applications"). Both forms compute in float32.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from prompt_tuning.models.memory_chunks import CHUNK, run_chunks, run_positions


class ScanInputs(NamedTuple):
    """What positions give to the rule, of rows, `[R, T, ...]`, or all together.

    Attributes:
      query: `[R, T, K]`.
      key: `[R, T, K]`.
      value: `[R, T, H, 1]`.
      step: `[R, T, H]`; with 0 a position leaves the memory as it is.
    """

    query: Float[Array, "*lead K"]
    key: Float[Array, "*lead K"]
    value: Float[Array, "*lead H 1"]
    step: Float[Array, "*lead H"]


def recurrent_scan(
    inputs: ScanInputs, memory: Float[Array, "R H K 1"], rates: Float[Array, "H K"]
) -> tuple[Float[Array, "R T H 1"], Float[Array, "R H K 1"]]:
    """Computes the rule position by position; returns output and last memory."""

    def step(memory, position):
        query, key, value, step = position
        decay, added = _change(key, value, step, rates)
        memory = memory * decay[..., None] + added[..., None]
        return memory, jnp.einsum("rhkv,rk->rhv", memory, query)

    return run_positions(step, inputs, memory)


def chunked_scan(
    inputs: ScanInputs,
    starts: Float[Array, "R n H K 1"],
    segments: Int[Array, "R T"] | None,
    rates: Float[Array, "H K"],
    *,
    chunk: int = CHUNK,
) -> tuple[Float[Array, "R T H 1"], Float[Array, "R H K 1"]]:
    """Computes the rule chunk by chunk; further arguments as of `run_chunks`."""

    def run_chunk(inputs, memory, examples):
        query, key, value, step = inputs
        decay, added = _change(key, value, step, rates)
        if examples.continues is not None:
            # The first position of an example reads what the example begins with.
            alike = jnp.diagonal(examples.together, -1, 1, 2)  # [R, C - 1]
            first = jnp.concatenate([~examples.continues[:, :1], ~alike], axis=1)
            first = first[..., None, None]
            begun = jnp.einsum("rnhk,rcn->rchk", examples.starts[..., 0], examples.base)
            added = jnp.where(first, added + decay * begun, added)
            decay = jnp.where(first, 0.0, decay)
        left, sums = jax.lax.associative_scan(_join, (decay, added), axis=1)
        memories = left * memory[:, None, ..., 0] + sums  # [R, C, H, K]
        output = jnp.einsum("rchk,rck->rch", memories, query)
        return output[..., None], memories[:, -1, ..., None]

    return run_chunks(run_chunk, inputs, starts, segments, chunk)


def _change(key, value, step, rates):
    """Returns how much of a memory is left, and what is added, each `[..., H, K]`."""
    added = (step[..., None] * value) * key[..., None, :]
    return jnp.exp(step[..., None] * rates), added


def _join(before, after):
    """Joins the changes by two stretches of positions, one after the other."""
    (left, added), (then_left, then_added) = before, after
    return left * then_left, then_left * added + then_added
