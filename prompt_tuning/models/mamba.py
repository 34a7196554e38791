"""Mamba as a mixer (Jamba, Falcon Mamba); see `selective_scan` for the rule."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import declare, named_key
from prompt_tuning.models.layers import Dense
from prompt_tuning.models.memory_mixer import MemoryMixer, MixerParts, skip_and_gate
from prompt_tuning.models.norms import root_mean_square_norm
from prompt_tuning.models.selective_scan import (
    ScanInputs,
    chunked_scan,
    recurrent_scan,
)
from prompt_tuning.settings.axis_rules import MEMORY_HEADS
from prompt_tuning.sharding import collectives

NORMED = ("step_down", "key", "query")


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
        for name, size in sizes.items():
            part_key, axes = named_key(key, name), (MEMORY_HEADS, "latent")
            dense = Dense(
                part_key, (heads, size), axes, layers=layers, bias=False, dtype=dtype
            )
            setattr(self, name, dense)
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
