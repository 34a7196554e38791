"""The gated delta rule: linear attention that replaces what it remembers of a key.

Yang et al. 2025, "Gated Delta Networks: Improving Mamba2 with Delta Rule", equation 10.
A head's memory is a matrix `S` of shape `[K, V]`. Position `t` with query `q`, key `k`,
value `v`, decay `a` (at most 1) and strength `b` computes

    S_t = a_t * S_{t-1} + k_t (b_t * (v_t - a_t * S_{t-1}^T k_t))^T
    o_t = S_t^T q_t

`recurrent_delta` does exactly this, position by position. `chunked_delta` computes the
same by matrix products within chunks (section 3.3 and appendix A there), with a loop
over chunks only. Both compute in float32.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

CHUNK = 64
"""Number of positions that are computed by products instead of one by one."""


class DeltaInputs(NamedTuple):
    """What positions of rows give to the rule.

    Attributes:
      query: `[R, T, H, K]`.
      key: `[R, T, H, K]`.
      value: `[R, T, H, V]`.
      decay: logarithm of the decay, `[R, T, H]`.
      strength: `[R, T, H]`; with 0 and a decay of 0 a position leaves the memory as it
        is.
    """

    query: Float[Array, "R T H K"]
    key: Float[Array, "R T H K"]
    value: Float[Array, "R T H V"]
    decay: Float[Array, "R T H"]
    strength: Float[Array, "R T H"]


def recurrent_delta(
    inputs: DeltaInputs, memory: Float[Array, "R H K V"]
) -> tuple[Float[Array, "R T H V"], Float[Array, "R H K V"]]:
    """Computes the rule position by position; returns output and last memory."""

    def step(memory, position):
        query, key, value, decay, strength = position
        memory = memory * jnp.exp(decay)[..., None, None]
        known = jnp.einsum("rhkv,rhk->rhv", memory, key)
        change = (value - known) * strength[..., None]
        memory = memory + key[..., None] * change[..., None, :]
        return memory, jnp.einsum("rhkv,rhk->rhv", memory, query)

    wide = jax.tree.map(lambda x: x.astype(jnp.float32).swapaxes(0, 1), inputs)
    memory, output = jax.lax.scan(step, memory.astype(jnp.float32), wide)
    return output.swapaxes(0, 1), memory


def chunked_delta(
    inputs: DeltaInputs,
    starts: Float[Array, "R n H K V"],
    segments: Int[Array, "R T"] | None = None,
    *,
    chunk: int = CHUNK,
) -> tuple[Float[Array, "R T H V"], Float[Array, "R H K V"]]:
    """Computes the rule chunk by chunk.

    Args:
      inputs: what the positions give.
      starts: memory before the first position of each row, or of each of the `n`
        examples of a packed row; one for all examples if `n` is 1.
      segments: number of each position's example, from 1, and 0 for padding, each of
        which begins with its own memory; None if each row is one example.
      chunk: number of positions of a chunk.

    Returns:
      the output, and the memory after the last position.
    """
    rows, length = inputs.decay.shape[:2]
    chunk = min(chunk, length)
    count = -(-length // chunk)
    padding = count * chunk - length

    def split(x: Array, mode: str = "constant") -> Array:
        """Pads `[R, T, ...]` and splits it into chunks, `[chunks, R, C, ...]`."""
        widths = [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)
        padded = jnp.pad(x, widths, mode=mode)
        return padded.reshape(rows, count, chunk, *x.shape[2:]).swapaxes(0, 1)

    wide = jax.tree.map(lambda x: split(x.astype(jnp.float32)), inputs)
    starts = starts.astype(jnp.float32)
    examples = None if segments is None else split(segments, "edge")
    # Before the first position there is no example, so all begin with their memory.
    last = jnp.full(rows, -1)
    run = jax.checkpoint(functools.partial(_run_chunk, starts), prevent_cse=False)
    (memory, _), output = jax.lax.scan(run, (starts[:, 0], last), (wide, examples))
    joined = output.swapaxes(0, 1).reshape(rows, count * chunk, *output.shape[3:])
    return joined[:, :length], memory


def _run_chunk(starts, carry, inputs):
    """Computes one chunk; `carry` has the memory and the example before it."""
    memory, before = carry
    chunk, examples = inputs
    heads_first = (x.swapaxes(1, 2) for x in chunk)  # [R, H, C, ...]
    query, key, value, decay, strength = heads_first
    length = decay.shape[-1]
    together = jnp.tri(length, dtype=bool)[None]  # [1, C, C]: j is at most i
    continues = base = None
    if examples is not None:
        together &= examples[:, :, None] == examples[:, None, :]
        continues = examples == before[:, None]  # [R, C]
        base = jax.nn.one_hot(jnp.maximum(examples - 1, 0), starts.shape[1])
        if starts.shape[1] == 1:
            base = jnp.ones((*examples.shape, 1))

    def read(x: Float[Array, "R H C K"]) -> Float[Array, "R H C V"]:
        """Reads what each position's example remembers from before the chunk."""
        held = jnp.einsum("rhck,rhkv->rhcv", x, memory)
        if continues is None:
            return held
        fresh = jnp.einsum("rhck,rnhkv,rcn->rhcv", x, starts, base)
        return jnp.where(continues[:, None, :, None], held, fresh)

    # Logarithm of the decay since the chunk or the example began, [R, H, C].
    since = jnp.einsum("rhj,rij->rhi", decay, together.astype(jnp.float32))
    apart = jnp.where(
        together[:, None], since[..., :, None] - since[..., None, :], -jnp.inf
    )
    between = jnp.exp(apart)  # [R, H, C, C]
    strong_key = key * strength[..., None]
    # How much of an earlier position's change each position already knows.
    known = jnp.einsum("rhik,rhjk->rhij", strong_key, key) * between
    system = jnp.tril(known, -1) + jnp.eye(length)
    right = jnp.concatenate(
        [value * strength[..., None], strong_key * jnp.exp(since)[..., None]], axis=-1
    )
    solved = jax.scipy.linalg.solve_triangular(
        system, right, lower=True, unit_diagonal=True
    )
    width = value.shape[-1]
    change = solved[..., :width] - read(solved[..., width:])  # [R, H, C, V]
    seen = jnp.einsum("rhik,rhjk->rhij", query, key) * between
    output = read(query * jnp.exp(since)[..., None]) + seen @ change
    # Of the last position's example, what is left at the end of the chunk.
    left = between[..., -1, :]  # [R, H, C]
    if continues is not None and base is not None and examples is not None:
        first = jnp.einsum("rnhkv,rn->rhkv", starts, base[:, -1])
        memory = jnp.where(continues[:, -1, None, None, None], memory, first)
        before = examples[:, -1]
    memory = memory * jnp.exp(since[..., -1])[..., None, None]
    memory = memory + jnp.einsum("rhck,rhcv->rhkv", key * left[..., None], change)
    return (memory, before), output.swapaxes(1, 2)
