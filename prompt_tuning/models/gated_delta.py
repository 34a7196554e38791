"""The gated delta rule: linear attention that overwrites what it stored for a key.

`GatedDelta` is a mixer that computes it, e.g. in Qwen 3.5 and OLMo Hybrid.

Yang et al. 2025, "Gated Delta Networks: Improving Mamba2 with Delta Rule", equation 10.
A head's memory is a matrix `S` of shape `[K, V]`. Position `t` with query `q`, key `k`,
value `v`, decay `a` (at most 1) and strength `b` computes

    S_t = a_t * S_{t-1} + k_t (b_t * (v_t - a_t * S_{t-1}^T k_t))^T
    o_t = S_t^T q_t

`recurrent_delta` does exactly this, one position at a time. `chunked_delta` computes
the same with matrix products within chunks (section 3.3 and appendix A there) and loops
over chunks only. Both compute in float32.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.models.memory_chunks import CHUNK, run_chunks, run_positions
from prompt_tuning.models.memory_mixer import MemoryMixer, MixerParts
from prompt_tuning.models.norms import root_mean_square_norm

BLOCK = 8
"""Rows of the blocks that are inverted by substitution."""
EPSILON = 1e-6
"""Added to the sum of squares of queries and keys before they are normalized."""


class DeltaInputs(NamedTuple):
    """Inputs of the rule: `[R, T, ...]` for rows, or `[n, ...]` for all positions.

    Attributes:
      query: `[R, T, H, K]`.
      key: `[R, T, H, K]`.
      value: `[R, T, H, V]`.
      decay: logarithm of the decay, `[R, T, H]`.
      strength: `[R, T, H]`; a position with strength 0 and decay 0 leaves the memory
        unchanged.
    """

    query: Float[Array, "*lead H K"]
    key: Float[Array, "*lead H K"]
    value: Float[Array, "*lead H V"]
    decay: Float[Array, "*lead H"]
    strength: Float[Array, "*lead H"]


def recurrent_delta(
    inputs: DeltaInputs, memory: Float[Array, "R H K V"]
) -> tuple[Float[Array, "R T H V"], Float[Array, "R H K V"]]:
    """Computes the rule position by position; returns the output and last memory."""

    def step(memory, position):
        query, key, value, decay, strength = position
        memory = memory * jnp.exp(decay)[..., None, None]
        known = jnp.einsum("rhkv,rhk->rhv", memory, key)
        change = (value - known) * strength[..., None]
        memory = memory + key[..., None] * change[..., None, :]
        return memory, jnp.einsum("rhkv,rhk->rhv", memory, query)

    return run_positions(step, inputs, memory)


def chunked_delta(
    inputs: DeltaInputs,
    starts: Float[Array, "R n H K V"],
    segments: Int[Array, "R T"] | None = None,
    *,
    chunk: int = CHUNK,
) -> tuple[Float[Array, "R T H V"], Float[Array, "R H K V"]]:
    """Computes the rule chunk by chunk; takes the same arguments as `run_chunks`."""
    return run_chunks(_run_chunk, inputs, starts, segments, chunk)


def _run_chunk(inputs, memory, examples):
    """Computes one chunk; see `memory_chunks.Rule`."""
    query, key, value, decay, strength = inputs  # [R, H, C, ...]
    since, left = examples.decays(decay)
    grown = jnp.exp(since)[..., None]
    strong_key = key * strength[..., None]
    # How much of an earlier position's change each position already knows.
    known = (strong_key @ key.swapaxes(-1, -2)) * left  # [R, H, C, C]
    system = jnp.tril(known, -1) + jnp.eye(decay.shape[-1])
    remembered = examples.read(strong_key * grown, memory)
    change = solve_unit_triangular(system, value * strength[..., None] - remembered)
    output = examples.read(query * grown, memory)
    output = output + ((query @ key.swapaxes(-1, -2)) * left) @ change
    memory = examples.at_end(memory) * jnp.exp(since[..., -1])[..., None, None]
    kept = key * left[..., -1, :, None]
    return output, memory + kept.swapaxes(-1, -2) @ change


@jax.custom_vjp
def solve_unit_triangular(
    system: Float[Array, "*lead C C"], right: Float[Array, "*lead C n"]
) -> Float[Array, "*lead C n"]:
    """Solves lower triangular systems with ones on the diagonal, by products alone.

    `jax.scipy.linalg.solve_triangular` calls LAPACK on a CPU, in tasks for the threads
    that run the program: two calls at once can wait for each other forever.
    """
    return _inverse(system) @ right


def _solve(system, right):
    inverse = _inverse(system)
    solved = inverse @ right
    return solved, (inverse, solved)


def _solve_backward(residuals, gradient):
    inverse, solved = residuals
    gradient = inverse.swapaxes(-1, -2) @ gradient
    # Only the entries below the diagonal are variables.
    return -jnp.tril(gradient @ solved.swapaxes(-1, -2), -1), gradient


solve_unit_triangular.defvjp(_solve, _solve_backward)


def _inverse(system):
    """Inverts blocks on the diagonal by substitution, larger ones from their halves."""
    length = system.shape[-1]
    size = max(BLOCK, 1 << (length - 1).bit_length())
    lead, padding = system.shape[:-2], [(0, size - length)] * 2
    system = jnp.pad(system, [(0, 0)] * (system.ndim - 2) + padding)
    inverse = _invert_blocks(_diagonal(system, BLOCK))  # [..., blocks, width, width]
    while (width := inverse.shape[-1]) < size:
        below = _diagonal(system, 2 * width)[..., width:, :width]
        upper, lower = inverse[..., ::2, :, :], inverse[..., 1::2, :, :]
        corner = -lower @ below @ upper
        inverse = jnp.block([[upper, jnp.zeros_like(upper)], [corner, lower]])
    return inverse.reshape(*lead, size, size)[..., :length, :length]


def _diagonal(system, width):
    """Returns the blocks on the diagonal, `[..., blocks, width, width]`."""
    starts = range(0, system.shape[-1], width)
    return jnp.stack(
        [system[..., i : i + width, i : i + width] for i in starts], axis=-3
    )


def _invert_blocks(blocks):
    """Inverts small lower triangular blocks with ones on the diagonal, row by row."""
    width = blocks.shape[-1]
    rows = [jnp.broadcast_to(jnp.eye(width)[0], blocks.shape[:-1])]
    for i in range(1, width):
        # Sums are faster here than products of so small matrices.
        known = sum(blocks[..., i, j, None] * row for j, row in enumerate(rows))
        rows.append(jnp.eye(width)[i] - known)
    return jnp.stack(rows, axis=-2)


class GatedDelta(MemoryMixer):
    """Gated delta rule.

    Attributes:
      strength: `[L, D, H]`.
      decay: `[L, D, H]`.
      decay_bias: added to `decay`, `[L, H]`.
      norm_scale: scale of the norm of each head's output, `[L, v]`.
    """

    recurrent, chunked = staticmethod(recurrent_delta), staticmethod(chunked_delta)

    def __init__(self, key: Key[Array, ""], config: ModelConfig, *, layers: int):
        parts = MixerParts(key, config, layers)
        super().__init__(parts)
        heads, ones = config.recurrent_heads, jax.nn.initializers.ones
        self.strength, self.decay = (
            parts.inward(name, heads) for name in ("strength", "decay")
        )
        self.decay_bias = parts.array("decay_bias", (heads,), ones)
        width = config.recurrent_width
        self.norm_scale = parts.array("norm_scale", (width,), ones, "head_width")

    def factors(self, x: Float[Array, "n D"]) -> tuple[Float[Array, "n H"], ...]:
        """Returns the decay and the strength of each position."""
        decay = jax.nn.softplus(
            self.decay(x).astype(jnp.float32) + self.decay_bias[...].astype(jnp.float32)
        )
        decay = -jnp.exp(self.decay_rate[...].astype(jnp.float32)) * decay
        strength = jax.nn.sigmoid(self.strength(x)).astype(jnp.float32)
        return decay, strength * self.config.maximum_strength

    def inputs(
        self,
        mixed: Mapping[str, Float[Array, "n _ _"]],
        factors: Sequence[Float[Array, "n H"]],
    ) -> DeltaInputs:
        """Returns the inputs of the rule, with queries and keys scaled to length 1."""
        value, (decay, strength) = mixed["value"], factors
        query, key = (_unit(mixed[name]) for name in ("query", "key"))
        shared = value.shape[1] // key.shape[1]
        query, key = (jnp.repeat(x, shared, axis=1) for x in (query, key))
        scaled = query * query.shape[-1] ** -0.5
        return DeltaInputs(scaled, key, value, decay, strength)

    def finish(
        self, output: Float[Array, "n H v"], values: Any, gate: Float[Array, "n Hv"]
    ) -> Float[Array, "n Hv"]:
        """Normalizes each head, then applies the gate, in float32."""
        del values
        wide, epsilon = output.astype(jnp.float32), self.config.memory_epsilon
        normed = root_mean_square_norm(wide, self.norm_scale[...], epsilon)
        opened = jax.nn.silu(gate.astype(jnp.float32)).reshape(normed.shape)
        return (normed * opened).reshape(gate.shape).astype(output.dtype)


def _unit(x: Float[Array, "n h k"]) -> Float[Array, "n h k"]:
    """Normalizes heads to length 1, in float32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt((wide * wide).sum(-1, keepdims=True) + EPSILON)
