"""States of recurrent mixers, and how they pass from one stream of rows to the next.

Later positions see nothing of a row but its state after the last real position. So
padding must not change a state, every example of a packed row starts fresh, and what
comes first (a prompt, a cache) hands on its last state.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from prompt_tuning.core.block_arrays import Blocks
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.models.row_info import positions_in_segment


class RecurrentState(NamedTuple):
    """What recurrent layers remember of rows.

    Attributes:
      window: last inputs of the convolution, `[L, N, W, C]` for `L` recurrent layers,
        or `[N, W, C]` for one; zeros before a row's first positions.
      memory: memory of each head, `[L, N, H, K, V]` or `[N, H, K, V]`, float32; None
        for mixers without one.
    """

    window: Blocks
    memory: Blocks | None = None

    @classmethod
    def zeros(cls, config: ModelConfig, rows: int) -> "RecurrentState":
        """Returns the states before the first position of rows."""
        shape = (len(config.recurrent_layers), rows)
        window = (config.window_inputs, config.convolution_channels)
        memory = None
        if config.recurrent_heads:
            sizes = (config.recurrent_key_width, config.recurrent_width)
            memory = jnp.zeros((*shape, config.recurrent_heads, *sizes), jnp.float32)
        return cls(jnp.zeros((*shape, *window), config.dtype), memory)


class StateView(NamedTuple):
    """How one stream continues the states before it, in every block.

    Attributes:
      rows: row of the earlier states that each row, or each example of a packed row,
        continues, `[R]` or `[R, n]`; None if each state serves equally many consecutive
        rows.
      positions: index of each position in its example, `[1 or R, Q]`.
      segments: example of each position, from 1, and 0 for padding; None if each row is
        one example.
      lengths: number of real positions of each row; None for all.
    """

    rows: Int[Array, "R"] | Int[Array, "R n"] | None
    positions: Int[Array, "#R Q"]
    segments: Int[Array, "R Q"] | None
    lengths: Int[Array, "_"] | None

    @classmethod
    def create(
        cls,
        rows: Int[Array, "R"] | Int[Array, "R n"] | None,
        length: int,
        segments: Int[Array, "R Q"] | None,
        lengths: Int[Array, "_"] | None,
    ) -> "StateView":
        """Returns the view of a stream of length `length`; see the attributes."""
        if segments is None:
            positions = jnp.arange(length)[None]
        else:
            positions = positions_in_segment(segments)
        return cls(rows, positions, segments, lengths)


def rows_before(
    state: Shaped[Array, "N *rest"], view: StateView, rows: int
) -> Shaped[Array, "..."]:
    """Selects the earlier states of a stream's rows, `[R, ...]` or `[R, n, ...]`."""
    if view.rows is not None:
        return state[view.rows]
    if len(state) in (1, rows):
        return jnp.broadcast_to(state, (rows, *state.shape[1:]))
    return jnp.repeat(state, rows // len(state), axis=0)


def last_positions(
    extended: Float[Array, "R _ C"], view: StateView, count: int
) -> Float[Array, "R W C"]:
    """Returns the last `count` (`W`) positions of each row before its padding.

    In `extended` the `count` earlier positions precede the rows' own.
    """
    if view.lengths is None:
        return extended[:, extended.shape[1] - count :]
    ends = jnp.broadcast_to(view.lengths, (len(extended),))
    index = ends[:, None] + jnp.arange(count)  # [R, W]
    return jnp.take_along_axis(extended, index[..., None], axis=1)


def last_state(states: Sequence[RecurrentState | None]) -> RecurrentState | None:
    """Returns the last state among contexts, of which some may have none."""
    known = [state for state in states if state is not None]
    return known[-1] if known else None


def join_rows(
    states: Sequence[RecurrentState | None], empty: RecurrentState | None
) -> RecurrentState | None:
    """Joins the states `[L, 1, ...]` of single rows into the state of all rows.

    A row without a state is at its beginning and gets `empty`, which is None in a model
    without recurrent layers.
    """
    if empty is None:
        return None
    known = [empty if state is None else state for state in states]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *known)


def choose_rows(
    chosen: Bool[Array, "N"], new: RecurrentState, old: RecurrentState
) -> RecurrentState:
    """Returns the new states `[L, N, ...]` for chosen rows, the old ones elsewhere."""

    def choose(new: Array, old: Array) -> Array:
        mask = chosen.reshape(1, -1, *[1] * (new.ndim - 2))
        return jnp.where(mask, new, old)

    return jax.tree.map(choose, new, old)


def replace_rows(
    old: RecurrentState, new: RecurrentState, numbers: Int[Array, "R"]
) -> RecurrentState:
    """Returns states `[L, N, ...]` with the rows `numbers` replaced."""
    return jax.tree.map(lambda x, y: x.at[:, numbers].set(y), old, new)
