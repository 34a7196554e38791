"""Mamba-2 as a mixer (Granite 4, Nemotron-H); see `state_space`."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.models.memory_mixer import MemoryMixer, MixerParts
from prompt_tuning.models.norms import (
    root_mean_square_norm,
    sharded_mean_square_norm,
)
from prompt_tuning.models.state_space import (
    StateInputs,
    chunked_states,
    recurrent_states,
)
from prompt_tuning.settings.axis_rules import MEMORY_HEADS


class Mamba2(MemoryMixer):
    """State-space mixer, whose keys are called `B`, queries `C` and values `x`.

    Attributes:
      step: `[L, D, H]`.
      step_bias: added to `step`, `[L, H]`.
      skip: factor of each head's values in its output, `[L, H]`.
      norm_scale: scale of the norm of the output, `[L, H v]`, or None.
    """

    order = ("value", "key", "query")
    biased = True
    recurrent, chunked = staticmethod(recurrent_states), staticmethod(chunked_states)

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
        """Returns the decay and the step of each position."""
        step = jax.nn.softplus(
            self.step(x).astype(jnp.float32) + self.step_bias[...].astype(jnp.float32)
        )
        step = jnp.maximum(step, self.config.minimum_step)
        return -jnp.exp(self.decay_rate[...].astype(jnp.float32)) * step, step

    def inputs(
        self,
        mixed: Mapping[str, Float[Array, "n _ _"]],
        factors: Sequence[Float[Array, "n H"]],
    ) -> StateInputs:
        """Returns the inputs of the rule."""
        decay, step = factors
        return StateInputs(**mixed, decay=decay, step=step)

    def finish(
        self,
        output: Float[Array, "n H v"],
        values: Float[Array, "n H v"],
        gate: Float[Array, "n Hv"],
    ) -> Float[Array, "n Hv"]:
        """Applies the gate, and normalizes the heads of each key if set, in float32."""
        wide = output.astype(jnp.float32)
        wide = wide + values * self.skip[...].astype(jnp.float32)[:, None]
        opened = wide.reshape(gate.shape) * jax.nn.silu(gate.astype(jnp.float32))
        if self.norm_scale is None:
            return opened.astype(output.dtype)
        config, scale = self.config, self.norm_scale[...]
        width = config.recurrent_heads * config.recurrent_width
        width, epsilon = width // config.recurrent_key_heads, config.memory_epsilon
        if config.recurrent_key_heads == 1:  # which devices may share
            own = MEMORY_HEADS, width
            normed = sharded_mean_square_norm(opened, scale, epsilon, *own)
        else:
            grouped, scale = (
                x.reshape(*x.shape[:-1], -1, width) for x in (opened, scale)
            )
            normed = root_mean_square_norm(grouped, scale, epsilon)
        return normed.reshape(gate.shape).astype(output.dtype)
