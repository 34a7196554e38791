"""Base of mixers with a memory per head: delta rule, Mamba, Mamba-2 and lightning.

The inputs of the rule come out of a short convolution (except in lightning attention)
and SiLU. The output is normalized and multiplied by a gate.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import Initializer, declare, fan_in, named_key
from prompt_tuning.models.layers import Dense, dense_layers
from prompt_tuning.models.recurrent_state import RecurrentState, StateView, rows_before
from prompt_tuning.models.short_convolution import convolve
from prompt_tuning.models.streams import StreamView, flatten_streams, split_streams
from prompt_tuning.settings.axis_rules import MEMORY_HEADS, MEMORY_KEYS
from prompt_tuning.sharding import collectives


class MixerParts(NamedTuple):
    """Declares the parameters of a mixer, stacked on its layers.

    Attributes:
      key: random key.
      config: config of the model.
      layers: number of layers with the mixer.
    """

    key: Key[Array, ""]
    config: ModelConfig
    layers: int

    def inward(self, name: str, size: int, axis: str = MEMORY_HEADS) -> Dense:
        """Declares a projection from the model width."""
        return self._dense(name, (self.config.width, size), ("embed", axis))

    def outward(self, name: str, size: int) -> Dense:
        """Declares a projection to the model width."""
        return self._dense(name, (size, self.config.width), (MEMORY_HEADS, "embed"))

    def array(
        self,
        name: str,
        shape: tuple[int, ...],
        initializer: Initializer,
        axis: str = MEMORY_HEADS,
    ) -> nnx.Param:
        """Declares another parameter of a `shape` in each layer.

        A mesh divides it by its last axis, `axis`, so each device has its heads' part.
        """
        axes = ("taps", axis)[-len(shape) :]
        return declare(
            named_key(self.key, name),
            (self.layers, *shape),
            ("layers", *axes),
            initializer,
            self.config.parameter_dtype,
            partial_over=MEMORY_HEADS,
        )

    def _dense(self, name, sizes, axes):
        return dense_layers(*self, biased=False)(name, sizes, axes)


class MemoryMixer(nnx.Module):
    """Mixer with `h` key heads of width `k` and `H` value heads of width `v`.

    Subclasses implement the rule in both forms and compute its inputs.

    Attributes:
      query: `[L, D, h k]`, unless a subclass computes it otherwise; the same for `key`.
      value: `[L, D, H v]`.
      gate: `[L, D, H v]`.
      taps: convolution weights for each name in `order`, latest position last, `[L, W +
        1, _]`; empty without convolution.
      tap_bias: bias of each convolution, `[L, _]`; empty without.
      decay_rate: logarithm of the decay's factor, `[L, H]`, or `[L, rates, H]` with
        more than one rate per head.
      output: `[L, H v, D]`.
    """

    order: ClassVar[tuple[str, ...]] = ("query", "key", "value")
    """Order of what the convolution reads, in its weights and its window."""
    biased: ClassVar[bool] = False
    """Whether the convolution has a bias."""
    recurrent: Callable[..., Any]
    chunked: Callable[..., Any]

    def __init__(self, parts: MixerParts, rates: tuple[int, ...] = ()):
        config = parts.config
        self.config, heads = config, config.recurrent_heads
        values = heads * config.recurrent_width
        keys = config.recurrent_key_heads * config.recurrent_key_width
        taps, zeros = config.convolution_width, jax.nn.initializers.zeros
        self.taps, self.tap_bias = nnx.Dict(), nnx.Dict()
        for name in self.order:
            is_value = name == "value"
            size, axis = (values, MEMORY_HEADS) if is_value else (keys, MEMORY_KEYS)
            setattr(self, name, parts.inward(name, size, axis))
            if taps:
                self.taps[name] = parts.array(
                    f"{name}_taps", (taps, size), fan_in(taps), axis
                )
            if self.biased:
                self.tap_bias[name] = parts.array(
                    f"{name}_tap_bias", (size,), zeros, axis
                )
        self.gate = parts.inward("gate", values)
        self.decay_rate = parts.array("decay_rate", (*rates, heads), zeros)
        self.output = parts.outward("output", values)

    def factors(self, x: Float[Array, "n D"]) -> tuple[Float[Array, "n H"], ...]:
        """Computes each position's decay and similar numbers; zero for padding."""
        raise NotImplementedError

    def inputs(
        self,
        mixed: Mapping[str, Float[Array, "n _ _"]],
        factors: Sequence[Float[Array, "n _"]],
    ) -> Any:
        """Returns the inputs of the rule, given the heads after the convolution."""
        raise NotImplementedError

    def finish(
        self, output: Float[Array, "n H v"], values: Any, gate: Float[Array, "n Hv"]
    ) -> Float[Array, "n Hv"]:
        """Normalizes the rule's output and applies the gate."""
        raise NotImplementedError

    def __call__(
        self,
        x: Float[Array, "n D"],
        views: Sequence[StreamView],
        state: RecurrentState | None,
    ) -> tuple[Float[Array, "n D"], tuple[RecurrentState, ...]]:
        """Applies one block's mixer; takes the same arguments as `ShortConvolution`."""
        x = collectives.copy_to_shards(x, MEMORY_HEADS)
        window, memory = (None, None) if state is None else state
        mixed, windows = self._convolve(x, views, cast(Array | None, window))
        real = _real(views)
        inputs = self.inputs(mixed, [factor * real for factor in self.factors(x)])
        split = [split_streams(part, views) for part in inputs]
        outputs, states = [], []
        for view, window, *parts in zip(views, windows, *split, strict=True):
            assert view.state is not None  # every stream of such a model has one
            of_stream = type(inputs)(*parts)
            output, memory = self._run(of_stream, view.state, cast(Array, memory))
            outputs.append(output.astype(x.dtype))
            states.append(RecurrentState(window, memory))
        output = flatten_streams(outputs)
        finished = self.finish(output, inputs.value, self.gate(x))
        return self.output(finished), tuple(states)

    def _convolve(
        self,
        x: Float[Array, "n D"],
        views: Sequence[StreamView],
        window: Float[Array, "N W C"] | None,
    ) -> tuple[dict[str, Float[Array, "n _ _"]], list[Float[Array, "R W C"]]]:
        """Returns the heads after convolution and SiLU, and streams' last windows."""
        projected = [getattr(self, name)(x) for name in self.order]
        bounds = np.cumsum([part.shape[-1] for part in projected])[:-1].tolist()
        mixed = jnp.concatenate(projected, axis=-1)
        taps = self._joined(self.taps, x.dtype) if self.taps else None
        outputs, windows = [], []
        for part, view in zip(split_streams(mixed, views), views, strict=True):
            if taps is None:
                windows.append(part[:, :0])
                continue
            assert view.state is not None
            output, window = convolve(part, taps, view.state, window)
            outputs.append(output)
            windows.append(window)
        mixed = flatten_streams(outputs) if self.taps else mixed
        if self.biased:
            mixed = mixed + self._joined(self.tap_bias, x.dtype)
        divided = jnp.split(jax.nn.silu(mixed), bounds, axis=-1)
        heads = map(self._heads, self.order, divided)
        return dict(zip(self.order, heads, strict=True)), windows

    def _joined(self, arrays: Mapping[str, Any], dtype: jnp.dtype) -> Array:
        """Concatenates the arrays of queries, keys and values in their order."""
        parts = [arrays[name][...] for name in self.order]
        return jnp.concatenate(parts, axis=-1).astype(dtype)

    def _heads(self, name: str, part: Float[Array, "n _"]) -> Float[Array, "n _ _"]:
        """Splits queries, keys or values into heads."""
        config = self.config
        keys = config.recurrent_key_width
        width = config.recurrent_width if name == "value" else keys
        return part.reshape(len(part), -1, width)

    def _run(
        self, inputs: Any, view: StateView, memory: Float[Array, "N H K V"] | None
    ) -> tuple[Float[Array, "R Q H V"], Float[Array, "R H K V"]]:
        """Applies the rule to one stream, starting from the memory before it."""
        rows, length, heads, values = inputs.value.shape
        if memory is None:
            memory = jnp.zeros((1, heads, inputs.key.shape[-1], values))
        start = rows_before(memory, view, rows)  # [R, (n,) H, K, V]
        if length == 1 and start.ndim == 4 and view.segments is None:
            return self.recurrent(inputs, start)
        starts = start if start.ndim == 5 else start[:, None]
        return self.chunked(inputs, starts, view.segments)


def _real(views: Sequence[StreamView]) -> Float[Array, "n 1"]:
    """Returns 1 for each position, and 0 for padding."""
    parts = []
    for view in views:
        rows, length = view.shape
        lengths = None if view.state is None else view.state.lengths
        real = jnp.ones((rows, length, 1), bool)
        if lengths is not None:
            real = jnp.arange(length)[:, None] < jnp.reshape(lengths, (-1, 1, 1))
        parts.append(jnp.broadcast_to(real, (rows, length, 1)))
    return flatten_streams(parts).astype(jnp.float32)


def skip_and_gate(
    output: Float[Array, "n H v"],
    values: Float[Array, "n H v"],
    skip: Float[Array, "H"],
    gate: Float[Array, "n Hv"],
) -> Float[Array, "n Hv"]:
    """Adds each head's values times a factor to the output, and applies the gate."""
    wide = output.astype(jnp.float32) + values * skip.astype(jnp.float32)[:, None]
    return wide.reshape(gate.shape) * jax.nn.silu(gate.astype(jnp.float32))
