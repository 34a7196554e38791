"""States of recurrent mixers, and how they pass from one stream of rows to the next.

A row's state after its last real position is all that later positions see of it. So
padding must not change a state, every example of a packed row begins anew, and what
comes first (a prompt, a cache) hands its last state on.
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
    """What the recurrent layers remember of rows.

    Attributes:
      window: last inputs of the convolution, `[L, N, W, C]`, or `[N, W, C]` of one
        layer, for `L` recurrent layers; zeros before a row's first positions.
      memory: memory of each head, `[L, N, H, K, V]`, or `[N, H, K, V]` of
        one layer, float32; None for other mixers.
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
    """How one stream continues the states of what precedes it, in every block.

    Attributes:
      rows: row of the preceding states that each row, or each example of a packed row,
        continues, `[R]` or `[R, n]`; None if equally many consecutive rows share each.
      positions: number of positions before each in its example, `[1 or R, Q]`.
      segments: number of each position's example, from 1, and 0 for padding; None if
        each row is one example.
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
        """Returns the view of a stream of a length; see the attributes."""
        if segments is None:
            positions = jnp.arange(length)[None]
        else:
            positions = positions_in_segment(segments)
        return cls(rows, positions, segments, lengths)


def rows_before(
    state: Shaped[Array, "N *rest"], view: StateView, rows: int
) -> Shaped[Array, "..."]:
    """Selects the preceding states of a stream's rows, `[R, ...]` or `[R, n, ...]`."""
    if view.rows is not None:
        return state[view.rows]
    if len(state) in (1, rows):
        return jnp.broadcast_to(state, (rows, *state.shape[1:]))
    return jnp.repeat(state, rows // len(state), axis=0)


def last_positions(
    extended: Float[Array, "R _ C"], view: StateView, count: int
) -> Float[Array, "R W C"]:
    """Returns the last `count` positions before padding of rows.

    Args:
      extended: `count` earlier positions and then those of the rows.
      view: view of the stream.
      count: number of positions `W`.
    """
    if view.lengths is None:
        return extended[:, extended.shape[1] - count :]
    ends = jnp.broadcast_to(view.lengths, (len(extended),))
    index = ends[:, None] + jnp.arange(count)  # [R, W]
    return jnp.take_along_axis(extended, index[..., None], axis=1)


def last_state(states: Sequence[RecurrentState | None]) -> RecurrentState | None:
    """Returns the state after several contexts: that of the last which has one."""
    known = [state for state in states if state is not None]
    return known[-1] if known else None


def join_rows(
    states: Sequence[RecurrentState | None], empty: RecurrentState | None
) -> RecurrentState | None:
    """Returns the states `[L, 1, ...]` of single rows as those of all rows.

    Args:
      states: state of each row; None at its beginning.
      empty: state at the beginning; None in a model without recurrent layers.
    """
    if empty is None:
        return None
    known = [empty if state is None else state for state in states]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *known)


def choose_rows(
    chosen: Bool[Array, "N"], new: RecurrentState, old: RecurrentState
) -> RecurrentState:
    """Returns the new states `[L, N, ...]` of chosen rows, the old ones of others."""

    def choose(new: Array, old: Array) -> Array:
        mask = chosen.reshape(1, -1, *[1] * (new.ndim - 2))
        return jnp.where(mask, new, old)

    return jax.tree.map(choose, new, old)


def replace_rows(
    old: RecurrentState, new: RecurrentState, numbers: Int[Array, "R"]
) -> RecurrentState:
    """Returns states `[L, N, ...]` with those of some rows replaced."""
    return jax.tree.map(lambda x, y: x.at[:, numbers].set(y), old, new)
