"""Mamba-2 as a mixer (Granite 4, Nemotron-H); see `state_space` for the rule."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.models.memory_mixer import MixerParts, skip_and_gate
from prompt_tuning.models.norms import root_mean_square_norm, sharded_mean_square_norm
from prompt_tuning.models.state_space import StateSpaceMixer
from prompt_tuning.settings.axis_rules import MEMORY_HEADS


class Mamba2(StateSpaceMixer):
    """State-space mixer, whose paper calls keys `B`, queries `C` and values `x`.

    Attributes:
      step: `[L, D, H]`.
      step_bias: added to `step`, `[L, H]`.
      skip: factor of each head's values in its output, `[L, H]`.
      norm_scale: scale of the norm of the output, `[L, H v]`, or None.
    """

    order = ("value", "key", "query")
    biased = True

    def __init__(self, key: Key[Array, ""], config: ModelConfig, *, layers: int):
        parts = MixerParts(key, config, layers)
        super().__init__(parts)
        heads, ones = config.recurrent_heads, jax.nn.initializers.ones
        self.step = parts.inward("step", heads)
        self.step_bias = parts.array("step_bias", (heads,), ones)
        self.skip = parts.array("skip", (heads,), ones)
        values = heads * config.recurrent_width
        self.norm_scale = (
            parts.array("norm_scale", (values,), ones)
            if config.recurrent_norm
            else None
        )

    def factors(self, x: Float[Array, "n D"]) -> tuple[Float[Array, "n H"], ...]:
        """Returns each position's decay and step."""
        step = jax.nn.softplus(
            self.step(x).astype(jnp.float32) + self.step_bias[...].astype(jnp.float32)
        )
        step = jnp.maximum(step, self.config.minimum_step)
        return -jnp.exp(self.decay_rate[...].astype(jnp.float32)) * step, step

    def finish(
        self,
        output: Float[Array, "n H v"],
        values: Float[Array, "n H v"],
        gate: Float[Array, "n Hv"],
    ) -> Float[Array, "n Hv"]:
        """Applies the gate, and normalizes per key head if set, in float32."""
        opened = skip_and_gate(output, values, self.skip[...], gate)
        if self.norm_scale is None:
            return opened.astype(output.dtype)
        config, scale = self.config, self.norm_scale[...]
        width = config.recurrent_heads * config.recurrent_width
        width, epsilon = width // config.recurrent_key_heads, config.memory_epsilon
        if config.recurrent_key_heads == 1:  # which devices may share
            axis = MEMORY_HEADS, width
            normed = sharded_mean_square_norm(opened, scale, epsilon, *axis)
        else:
            grouped, scale = (
                x.reshape(*x.shape[:-1], -1, width) for x in (opened, scale)
            )
            normed = root_mean_square_norm(grouped, scale, epsilon)
        return normed.reshape(gate.shape).astype(output.dtype)
