"""Mamba's selective scan: channels whose memory decays at a separate rate per number.

`Mamba` is a mixer that computes it (Jamba, Falcon Mamba).

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
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import declare, named_key
from prompt_tuning.models.layers import dense_layers
from prompt_tuning.models.memory_chunks import run_chunks, run_positions
from prompt_tuning.models.memory_mixer import MemoryMixer, MixerParts, skip_and_gate
from prompt_tuning.models.norms import root_mean_square_norm
from prompt_tuning.settings.axis_rules import MEMORY_HEADS
from prompt_tuning.sharding import collectives

CHUNK = 16
"""Positions between two memories that a backward pass keeps."""
NORMED = ("step_down", "key", "query")


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


class Mamba(MemoryMixer):
    """Selective scan of `H` channels: heads of width 1 that share one key.

    The convolution reads only the values; everything else is computed from its output.

    Attributes:
      key: `[L, H, k]`.
      query: `[L, H, k]`.
      step_down: projection to the rank `r` of steps, `[L, H, r]`.
      norm_scales: scales of norms of these three, `[L, k]` or `[L, r]`, or none.
      step_up: `[L, r, H]`; an array, not a projection, because PEFT's adapters do not
        reach it in transformers either.
      step_bias: `[L, H]`.
      skip: factor of each channel's value in its output, `[L, H]`.
    """

    order = ("value",)
    biased = True

    def __init__(self, key: Key[Array, ""], config: ModelConfig, *, layers: int):
        parts = MixerParts(key, config, layers)
        keys, rank = config.recurrent_key_width, config.step_rank
        super().__init__(parts, (keys,))
        heads, ones = config.recurrent_heads, jax.nn.initializers.ones
        sizes = dict(zip(NORMED, (rank, keys, keys), strict=True))
        dtype, self.norm_scales = config.parameter_dtype, nnx.Dict()
        dense = dense_layers(key, config, layers, biased=False)
        for name, size in sizes.items():
            setattr(self, name, dense(name, (heads, size), (MEMORY_HEADS, "latent")))
            if config.recurrent_norm and config.recurrent_norm_scaled:
                shape, axes = (layers, size), ("layers", "latent")
                scale = declare(
                    named_key(key, f"{name}_norm"), shape, axes, ones, dtype
                )
                self.norm_scales[name] = scale
        small = jax.nn.initializers.normal(rank**-0.5)
        self.step_up = parts.array("step_up", (rank, heads), small)
        self.step_bias = parts.array("step_bias", (heads,), ones)
        self.skip = parts.array("skip", (heads,), ones)

    def factors(self, x: Float[Array, "n D"]) -> tuple[Float[Array, "n 1"]]:
        """Returns 1 for each position, so that padding becomes 0."""
        return (jnp.ones((len(x), 1)),)

    def inputs(
        self,
        mixed: Mapping[str, Float[Array, "n _ _"]],
        factors: Sequence[Float[Array, "n _"]],
    ) -> ScanInputs:
        """Returns the inputs of the rule."""
        value, [real] = mixed["value"], factors
        down, key, query = (self._shared(name, value[..., 0]) for name in NORMED)
        step = (down @ self.step_up[...].astype(down.dtype)).astype(jnp.float32)
        step = jax.nn.softplus(step + self.step_bias[...].astype(jnp.float32))
        return ScanInputs(query, key, value, step * real)

    def _shared(self, name: str, x: Float[Array, "n H"]) -> Float[Array, "n _"]:
        """Projects the channels to something that they all share, and normalizes it."""
        shared, scaled = getattr(self, name)(x), name in self.norm_scales
        if self.config.recurrent_norm:
            scale = (
                self.norm_scales[name][...] if scaled else jnp.ones(shared.shape[-1])
            )
            shared = root_mean_square_norm(shared, scale, self.config.memory_epsilon)
        return collectives.copy_to_shards(shared, MEMORY_HEADS)

    def finish(
        self,
        output: Float[Array, "n H v"],
        values: Float[Array, "n H v"],
        gate: Float[Array, "n Hv"],
    ) -> Float[Array, "n Hv"]:
        """Adds the skipped values and applies the gate, in float32."""
        opened = skip_and_gate(output, values, self.skip[...], gate)
        return opened.astype(output.dtype)

    @property
    def _rates(self) -> Float[Array, "H K"]:
        return -jnp.exp(self.decay_rate[...].astype(jnp.float32)).T

    def recurrent(
        self, inputs: ScanInputs, memory: Float[Array, "R H K 1"]
    ) -> tuple[Float[Array, "R T H 1"], Float[Array, "R H K 1"]]:
        """Applies the rule; see `recurrent_scan`."""
        return recurrent_scan(inputs, memory, self._rates)

    def chunked(
        self,
        inputs: ScanInputs,
        starts: Float[Array, "R n H K 1"],
        segments: Int[Array, "R T"] | None,
    ) -> tuple[Float[Array, "R T H 1"], Float[Array, "R H K 1"]]:
        """Applies the rule; see `chunked_scan`."""
        return chunked_scan(inputs, starts, segments, self._rates)
