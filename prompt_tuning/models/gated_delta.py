"""The gated delta rule (`delta_rule`) as a mixer, e.g. in Qwen 3.5 and OLMo Hybrid."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.models.delta_rule import (
    DeltaInputs,
    chunked_delta,
    recurrent_delta,
)
from prompt_tuning.models.memory_mixer import MemoryMixer, MixerParts
from prompt_tuning.models.norms import root_mean_square_norm

EPSILON = 1e-6
"""Added to the sum of squares of queries and keys before they are normalized."""


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
