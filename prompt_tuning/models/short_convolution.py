"""LFM2's gated short convolution: a mixer with a window of past inputs as its state.

Liquid AI 2025, "LFM2 Technical Report", section 2: with `b, c, x = input(h)`, the
output is `output(c * convolution(b * x))`. The convolution is causal, spans few
positions, and treats each channel separately.
"""

from collections.abc import Sequence
from typing import cast

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import declare, fan_in, named_key
from prompt_tuning.models.layers import dense_layers
from prompt_tuning.models.recurrent_state import (
    RecurrentState,
    StateView,
    last_positions,
    rows_before,
)
from prompt_tuning.models.streams import StreamView, flatten_streams, split_streams


class ShortConvolution(nnx.Module):
    """Gated causal convolution over the last positions.

    Attributes:
      input: gates before and after the convolution, and its input, `[L, D, 3 D]`.
      taps: weights of the convolution, the latest position last, `[L, W + 1, D]`.
      output: `[L, D, D]`.
    """

    def __init__(self, key: Key[Array, ""], config: ModelConfig, *, layers: int):
        dense = dense_layers(key, config, layers, biased=False)
        width = config.width
        self.input = dense("input", (width, 3 * width), ("embed", "mixer"))
        self.taps = declare(
            named_key(key, "taps"),
            (layers, config.convolution_width, width),
            ("layers", "taps", "mixer"),
            fan_in(config.convolution_width),
            config.parameter_dtype,
        )
        self.output = dense("output", (width, width), ("mixer", "embed"))

    def __call__(
        self,
        x: Float[Array, "n D"],
        views: Sequence[StreamView],
        state: RecurrentState | None,
    ) -> tuple[Float[Array, "n D"], tuple[RecurrentState, ...]]:
        """Applies one block's mixer to normalized hidden states of all streams.

        Each stream continues the state of the one before it, the first one `state`, or
        zeros if None. Returns the output, and the state after each stream.
        """
        gate_in, gate_out, inner = jnp.split(self.input(x), 3, axis=-1)  # [n, D] each
        taps = self.taps[...].astype(x.dtype)
        outputs, states = [], []
        for part, view in zip(
            split_streams(gate_in * inner, views), views, strict=True
        ):
            assert view.state is not None  # every stream of such a model has one
            window = None if state is None else cast(Array, state.window)
            output, window = convolve(part, taps, view.state, window)
            state = RecurrentState(window)
            outputs.append(output)
            states.append(state)
        return self.output(gate_out * flatten_streams(outputs)), tuple(states)


def convolve(
    x: Float[Array, "R Q C"],
    taps: Float[Array, "taps C"],
    view: StateView,
    window: Float[Array, "N W C"] | None,
) -> tuple[Float[Array, "R Q C"], Float[Array, "R W C"]]:
    """Convolves each channel causally, continuing a window of earlier inputs.

    Args:
      x: inputs of rows.
      taps: weights `w`: position `t` is the sum of `w[W - d] * x[t - d]`.
      view: where rows and their examples begin and end.
      window: the `W` inputs before them; None for zeros.

    Returns:
      the output, and the last `W` inputs of each row before its padding.
    """
    rows, length, _ = x.shape
    count = len(taps) - 1
    if window is None:
        window = jnp.zeros((1, count, x.shape[-1]), x.dtype)
    start = rows_before(window.astype(x.dtype), view, rows)  # [R, (n,) W, C]
    first = start if start.ndim == 3 else start[:, 0]
    extended = jnp.concatenate([first, x], axis=1)  # [R, W + Q, C]
    output = x * taps[count]
    for distance in range(1, count + 1):
        earlier = extended[:, count - distance : count - distance + length]
        if view.segments is not None:
            within = (view.positions >= distance)[..., None]  # [R, Q, 1]
            earlier = jnp.where(within, earlier, _at_start(start, view, distance))
        output = output + earlier * taps[count - distance]
    return output, last_positions(extended, view, count)


def _at_start(
    start: Float[Array, "R *n W C"], view: StateView, distance: int
) -> Float[Array, "R Q C"]:
    """Returns the window's input that lies `distance` positions before each position.

    It is right only for positions within `distance` of their example's start.
    """
    count = start.shape[-2]
    place = jnp.clip(count + view.positions - distance, 0, count - 1)  # [R, Q]
    if start.ndim == 3:
        return jnp.take_along_axis(start, place[..., None], axis=1)
    assert view.segments is not None  # only packed rows have states by example
    example = jnp.maximum(view.segments - 1, 0)
    return start[jnp.arange(len(start))[:, None], example, place]
