"""Mamba-2's state-space rule: linear attention with a decaying memory.

Dao and Gu 2024, "Transformers are SSMs: Generalized Models and Efficient Algorithms
Through Structured State Space Duality", section 6. A head's memory is a matrix `S` of
shape `[K, V]`. Position `t` with query `q` (there `C`), key `k` (`B`), value `v` (`x`),
step `d` and decay `a` (`d A`, whose exponential is at most 1) computes

    S_t = exp(a_t) * S_{t-1} + d_t * k_t v_t^T
    o_t = S_t^T q_t

`recurrent_states` does exactly this, one position at a time. `chunked_states` computes
the same with matrix products within chunks and loops over chunks only. Both compute in
float32.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from prompt_tuning.models.memory_chunks import CHUNK, run_chunks, run_positions
from prompt_tuning.models.memory_mixer import MemoryMixer


class StateInputs(NamedTuple):
    """Inputs of the rule: `[R, T, ...]` for rows, or `[n, ...]` for all positions.

    Attributes:
      query: `[R, T, G, K]`, each for equally many consecutive heads.
      key: `[R, T, G, K]`.
      value: `[R, T, H, V]`.
      decay: logarithm of the decay, `[R, T, H]`.
      step: `[R, T, H]`; a position with step 0 and decay 0 leaves the memory unchanged.
    """

    query: Float[Array, "*lead G K"]
    key: Float[Array, "*lead G K"]
    value: Float[Array, "*lead H V"]
    decay: Float[Array, "*lead H"]
    step: Float[Array, "*lead H"]


def recurrent_states(
    inputs: StateInputs, memory: Float[Array, "R H K V"]
) -> tuple[Float[Array, "R T H V"], Float[Array, "R H K V"]]:
    """Computes the rule position by position; returns the output and last memory."""
    shared = inputs.value.shape[2] // inputs.key.shape[2]

    def step(memory, position):
        query, key, value, decay, step = position
        query, key = (jnp.repeat(x, shared, axis=1) for x in (query, key))
        added = key[..., None] * (value * step[..., None])[..., None, :]
        memory = memory * jnp.exp(decay)[..., None, None] + added
        return memory, jnp.einsum("rhkv,rhk->rhv", memory, query)

    return run_positions(step, inputs, memory)


def chunked_states(
    inputs: StateInputs,
    starts: Float[Array, "R n H K V"],
    segments: Int[Array, "R T"] | None = None,
    *,
    chunk: int = CHUNK,
) -> tuple[Float[Array, "R T H V"], Float[Array, "R H K V"]]:
    """Computes the rule chunk by chunk; takes the same arguments as `run_chunks`."""
    return run_chunks(_run_chunk, inputs, starts, segments, chunk)


def _run_chunk(inputs, memory, examples):
    """Computes one chunk; see `memory_chunks.Rule`."""
    query, key, value, decay, step = inputs  # [R, G or H, C, ...]
    heads, groups = value.shape[1], key.shape[1]
    since, left = examples.decays(decay)
    added = value * step[..., None]  # [R, H, C, V]
    scores = query @ key.swapaxes(-1, -2)  # [R, G, C, C]
    query, key, scores = (
        jnp.repeat(x, heads // groups, axis=1) for x in (query, key, scores)
    )
    output = examples.read(query * jnp.exp(since)[..., None], memory)
    output = output + (scores * left) @ added
    memory = examples.at_end(memory) * jnp.exp(since[..., -1])[..., None, None]
    kept = key * left[..., -1, :, None]
    return output, memory + kept.swapaxes(-1, -2) @ added


class StateSpaceMixer(MemoryMixer):
    """Base class of mixers that compute the rule.

    Their `factors` are a decay and a step for each head.
    """

    recurrent, chunked = staticmethod(recurrent_states), staticmethod(chunked_states)

    def inputs(
        self,
        mixed: Mapping[str, Float[Array, "n _ _"]],
        factors: Sequence[Float[Array, "n H"]],
    ) -> StateInputs:
        """Returns the inputs of the rule."""
        decay, step = factors
        return StateInputs(**mixed, decay=decay, step=step)
