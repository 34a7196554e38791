"""The gated delta rule as a mixer (Qwen3-Next, Qwen 3.5); see `delta_rule`.

A short convolution and SiLU precede the queries, keys and values. The output is
normalized in each head and multiplied by a gate.
"""

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import declare, fan_in, named_key
from prompt_tuning.models.delta_rule import (
    DeltaInputs,
    chunked_delta,
    recurrent_delta,
)
from prompt_tuning.models.layers import Dense
from prompt_tuning.models.recurrent_state import (
    RecurrentState,
    StateView,
    rows_before,
)
from prompt_tuning.models.short_convolution import convolve
from prompt_tuning.models.streams import StreamView, flatten_streams, split_streams

EPSILON = 1e-6
"""Added to the sum of squares of queries and keys before they are normalized."""


class GatedDelta(nnx.Module):
    """Gated delta rule of `h` key heads of width `k`, `H` value heads of width `v`.

    Attributes:
      input: queries, keys and values, `[L, D, C]` with `C = 2 h k + H v`.
      gate: `[L, D, H v]`.
      strength: `[L, D, H]`.
      decay: `[L, D, H]`.
      taps: weights of the convolution, the latest position last, `[L, W + 1, C]`.
      decay_bias: added to `decay`, `[L, H]`.
      decay_rate: logarithm of the factor of the decay, `[L, H]`.
      norm_scale: scale of the norm of a head's output, `[L, v]`.
      output: `[L, H v, D]`.
    """

    def __init__(self, key: Key[Array, ""], config: ModelConfig, *, layers: int):
        self.config = config
        heads = config.recurrent_heads
        values, channels = heads * config.recurrent_width, config.convolution_channels

        def dense(name, sizes, axes):
            return Dense(
                named_key(key, name),
                sizes,
                axes,
                layers=layers,
                bias=False,
                dtype=config.parameter_dtype,
            )

        def array(name, shape, initializer):
            axes = ("layers", "taps", "mixer")
            return declare(
                named_key(key, name),
                (layers, *shape),
                (axes[0], *axes[-len(shape) :]),
                initializer,
                config.parameter_dtype,
            )

        def inward(name, size):
            return dense(name, (config.width, size), ("embed", "mixer"))

        zeros, ones = jax.nn.initializers.zeros, jax.nn.initializers.ones
        self.input = inward("input", channels)
        self.gate = inward("gate", values)
        self.strength, self.decay = inward("strength", heads), inward("decay", heads)
        taps = config.convolution_width
        self.taps = array("taps", (taps, channels), fan_in(taps))
        self.decay_bias = array("decay_bias", (heads,), ones)
        self.decay_rate = array("decay_rate", (heads,), zeros)
        self.norm_scale = array("norm_scale", (config.recurrent_width,), ones)
        self.output = dense("output", (values, config.width), ("mixer", "embed"))

    def __call__(
        self,
        x: Float[Array, "n D"],
        views: Sequence[StreamView],
        state: RecurrentState | None,
    ) -> tuple[Float[Array, "n D"], tuple[RecurrentState, ...]]:
        """Applies the mixer of one block; see `ShortConvolution`."""
        taps = self.taps[...].astype(x.dtype)
        decay = jax.nn.softplus(
            self.decay(x).astype(jnp.float32) + self.decay_bias[...].astype(jnp.float32)
        )
        decay = -jnp.exp(self.decay_rate[...].astype(jnp.float32)) * decay  # [n, H]
        strength = jax.nn.sigmoid(self.strength(x)).astype(jnp.float32)
        parts = (self.input(x), decay, strength)
        outputs, states = [], []
        for view, *of_stream in zip(
            views, *(split_streams(part, views) for part in parts), strict=True
        ):
            assert view.state is not None  # every stream of such a model has one
            projected, *factors = of_stream
            window, memory = (None, None) if state is None else state
            mixed, window = convolve(
                projected, taps, view.state, cast(Array | None, window)
            )
            inputs = self._inputs(jax.nn.silu(mixed), factors, view.state)
            output, memory = _run(inputs, view.state, cast(Array | None, memory))
            state = RecurrentState(window, memory)
            outputs.append(output.astype(x.dtype))
            states.append(state)
        normed = self._normalize(flatten_streams(outputs), self.gate(x))
        return self.output(normed), tuple(states)

    def _inputs(self, mixed: Array, factors: Sequence[Array], view: StateView) -> Any:
        """Returns the inputs of the rule, from `[R, Q, C]` after the convolution."""
        config = self.config
        keys = config.recurrent_key_heads * config.recurrent_key_width
        query, key, value = jnp.split(mixed, [keys, 2 * keys], axis=-1)
        shape, width = mixed.shape[:2], config.recurrent_key_width
        query, key = (x.reshape(*shape, -1, width) for x in (query, key))
        value = value.reshape(*shape, -1, config.recurrent_width)
        shared = config.recurrent_heads // config.recurrent_key_heads
        query, key = (jnp.repeat(_unit(x), shared, axis=2) for x in (query, key))
        decay, strength = factors
        if view.lengths is not None:
            real = jnp.arange(shape[1]) < jnp.reshape(view.lengths, (-1, 1))
            decay, strength = (x * real[..., None] for x in (decay, strength))
        return DeltaInputs(query * width**-0.5, key, value, decay, strength)

    def _normalize(
        self, output: Float[Array, "n H v"], gate: Float[Array, "n Hv"]
    ) -> Float[Array, "n Hv"]:
        """Normalizes each head, and applies the gate, in float32."""
        wide = output.astype(jnp.float32)
        square = jnp.mean(wide * wide, -1, keepdims=True)
        normed = wide * jax.lax.rsqrt(square + self.config.norm_epsilon)
        normed = normed * self.norm_scale[...].astype(jnp.float32)
        opened = jax.nn.silu(gate.astype(jnp.float32)).reshape(normed.shape)
        return (normed * opened).reshape(gate.shape).astype(output.dtype)


def _unit(x: Float[Array, "R Q h k"]) -> Float[Array, "R Q h k"]:
    """Normalizes heads to length 1, in float32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt((wide * wide).sum(-1, keepdims=True) + EPSILON)


def _run(
    inputs: DeltaInputs, view: StateView, memory: Float[Array, "N H K V"] | None
) -> tuple[Float[Array, "R Q H V"], Float[Array, "R H K V"]]:
    """Applies the rule to one stream, from what precedes it on."""
    rows, length, heads, width = inputs.key.shape
    if memory is None:
        memory = jnp.zeros((1, heads, width, inputs.value.shape[-1]))
    start = rows_before(memory, view, rows)  # [R, (n,) H, K, V]
    if length == 1 and start.ndim == 4 and view.segments is None:
        return recurrent_delta(inputs, start)
    starts = start if start.ndim == 5 else start[:, None]
    return chunked_delta(inputs, starts, view.segments)
