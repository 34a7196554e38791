"""Lightning attention as a mixer (MiniMax-Text-01); see `state_space` for the rule.

MiniMax 2025, "MiniMax-01: Scaling Foundation Models with Lightning Attention", section
2.2: linear attention in which each head's memory decays by a fixed factor. It has no
convolution.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.models.memory_mixer import MixerParts
from prompt_tuning.models.norms import sharded_mean_square_norm
from prompt_tuning.models.state_space import StateSpaceMixer
from prompt_tuning.settings.axis_rules import MEMORY_HEADS


class Lightning(StateSpaceMixer):
    """Linear attention with a fixed decay.

    Attributes:
      decay_rate: amount by which the logarithm of the memory drops per position, `[L,
        H]`.
      norm_scale: scale of the norm over all heads together, `[L, H v]`.
    """

    def __init__(self, key: Key[Array, ""], config: ModelConfig, *, layers: int):
        parts = MixerParts(key, config, layers)
        super().__init__(parts)
        self.width = config.recurrent_heads * config.recurrent_width
        ones = jax.nn.initializers.ones
        self.norm_scale = parts.array("norm_scale", (self.width,), ones)

    def factors(self, x: Float[Array, "n D"]) -> tuple[Float[Array, "n H"], ...]:
        """Returns each position's decay, and its step, which is 1."""
        rate = self.decay_rate[...].astype(jnp.float32)
        ones = jnp.ones((len(x), *rate.shape))
        return -rate * ones, ones

    def finish(
        self, output: Float[Array, "n H v"], values: Any, gate: Float[Array, "n Hv"]
    ) -> Float[Array, "n Hv"]:
        """Normalizes all heads together and applies the gate."""
        del values
        flat, epsilon = output.reshape(gate.shape), self.config.memory_epsilon
        scale, whole = self.norm_scale[...], (MEMORY_HEADS, self.width)
        return jax.nn.sigmoid(gate) * sharded_mean_square_norm(
            flat, scale, epsilon, *whole
        )
