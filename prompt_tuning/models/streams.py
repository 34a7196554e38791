"""Streams of rows that run through the blocks together, and the keys they attend to.

A *stream* is a set of rows whose positions attend to the same kinds of keys: text, a
prompt, or both joined. Position-wise layers (norms, projections, the feed-forward
layer) run on all streams together as one `[positions, D]`; `flatten_streams` and
`split_streams` convert between the two forms.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from prompt_tuning.core.dropout import DropoutIndex
from prompt_tuning.core.layer_kinds import KEYS, MIXERS
from prompt_tuning.core.masks import CausalMask, Count
from prompt_tuning.models.attention import AttentionSource, KeyValues
from prompt_tuning.models.disentangled import RelativePositions
from prompt_tuning.models.recurrent_state import RecurrentState, StateView
from prompt_tuning.sharding import collectives

Mask = Bool[Array, "#R 1 #Q _"] | None
OwnMask = Mask | CausalMask
ContextMask = Bool[Array, "_ 1 _ _"] | None


class BlockInput(NamedTuple):
    """A change to a stream's hidden states as they enter each block.

    Attributes:
      values: tree of arrays, stacked on `L`.
      apply: `f(hidden [R, Q, D], one block's values) -> hidden`.
    """

    values: Any
    apply: Callable[[Float[Array, "R Q D"], Any], Float[Array, "R Q D"]]


@dataclasses.dataclass(frozen=True)
class Stream:
    """Rows that run through the blocks together.

    Attributes:
      hidden: hidden states, `[R, Q, D]`.
      positions: positions for the rotary embedding, the learned table or the relative
        bias, `[1 or R, Q]`.
      mask: attention mask within each row; a `CausalMask` if causal.
      context_mask: mask of the keys that later streams attend to; None for no mask.
      context_rows: row or rows of this stream that each row of a later stream attends
        to, `[R]` or `[R, n]`; None if each serves equally many consecutive rows.
      context_positions: positions of the keys that later streams attend to; `positions`
        if None.
      segments: example of each position in packed rows, 0 for padding.
      lengths: number of real positions of each row, which come first; None for all.
      block_input: change made to `hidden` as it enters each block.
      shared: whether these rows are prompts shared by the batch instead of rows of it.
      beyond_window: whether windows leave these keys in sight of later streams.
      active: marks where a token has invoked the adapters; None if they always act.
    """

    hidden: Float[Array, "R Q D"]
    positions: Int[Array, "#R Q"]
    mask: OwnMask
    context_mask: ContextMask = None
    context_rows: Int[Array, "_"] | Int[Array, "_ n"] | None = None
    context_positions: Int[Array, "_ _"] | None = None
    segments: Int[Array, "R Q"] | None = None
    lengths: Int[Array, "_"] | None = None
    block_input: BlockInput | None = None
    shared: bool = False
    beyond_window: bool = False
    active: Bool[Array, "R #Q"] | None = None

    @property
    def row_range(self) -> collectives.IndexRange:
        """Range of these rows in the whole batch."""
        rows = len(self.hidden)
        return (
            collectives.IndexRange(0, rows)
            if self.shared
            else collectives.row_range(rows)
        )

    @property
    def dropout_index(self) -> DropoutIndex:
        """Index in the whole batch of each element of `hidden`."""
        return DropoutIndex.for_rows(self.hidden.shape, self.row_range.first)

    def shift_positions(self, count: Count) -> "Stream":
        """Returns the same rows, `count` positions later."""
        return dataclasses.replace(self, positions=self.positions + count)

    def as_context(self, kept: "Kept") -> "Context":
        """Returns this stream as context of later streams, given what it kept."""
        return Context(
            kept.key_values,
            self.context_mask,
            self.context_rows,
            self.key_positions,
            kept.state,
        )

    @property
    def key_positions(self) -> Int[Array, "_ _"] | None:
        """Positions of the keys that later streams attend to; None beyond windows."""
        if self.beyond_window:
            return None
        return (
            self.positions if self.context_positions is None else self.context_positions
        )


class Kept(NamedTuple):
    """Keys, values and states that a stream leaves for later positions.

    Attributes:
      key_values: keys and values, stacked on the layers with attention.
      state: states after each row's last real position, stacked on the recurrent
        layers; None without such layers.
    """

    key_values: KeyValues
    state: RecurrentState | None = None


class Context(NamedTuple):
    """Keys and values of all blocks, computed earlier, as a stream attends to them.

    Attributes:
      key_values: `[L, G, N, S, K]`, where `N` is `R`, or less if rows share them; or an
        encoder's output `[N, S, D]`, from which each block computes its own.
      mask: see `Stream.context_mask`.
      rows: see `Stream.context_rows`.
      positions: positions for the relative position bias and for windows, `[1 or N,
        S]`; None in cross-attention, which has neither, and for keys that windows leave
        in sight.
      state: recurrent states after it; None if it has or changes none.
    """

    key_values: KeyValues | Array
    mask: Mask
    rows: Int[Array, "R"] | Int[Array, "R n"] | None = None
    positions: Int[Array, "_ S"] | None = None
    state: RecurrentState | None = None

    @property
    def row_count(self) -> int:
        """Number of rows of keys, `N`."""
        if isinstance(self.key_values, KeyValues):
            return self.key_values.keys.shape[2]
        return len(self.key_values)


class BlockValues(NamedTuple):
    """Values that differ between the blocks of a stack, apart from parameters.

    Attributes:
      reach: number of positions that a query attends to, itself included, `[L]`; None
        without windows.
      rotary_table: index of the rotary angles, `[L]`; None if all blocks use the same.
      bias_table: bias of each head and bucket of relative positions, `[L, H, buckets]`;
        None if blocks do not differ in it.
    """

    reach: Int[Array, "*L"] | None
    rotary_table: Int[Array, "*L"] | None
    bias_table: Float[Array, "*L H buckets"] | None


class AttentionView(NamedTuple):
    """How a stream attends to one source, in every block or in one.

    Attributes:
      mask: mask of the scores.
      rows: rows of the source that each row attends to; see `Stream.context_rows`.
      bias: bias added to the scores.
      distance: number of positions from each key to each query; None if windows leave
        all keys in sight.
      buckets: buckets of relative positions, if the bias differs between blocks.
      shared: whether all rows attend to the source's only row.
    """

    mask: OwnMask
    rows: Int[Array, "R"] | Int[Array, "R n"] | None
    bias: Float[Array, "#R H Q S"] | None
    distance: Int[Array, "#R Q S"] | None = None
    buckets: Int[Array, "#R Q S"] | None = None
    shared: bool = False

    def in_block(self, values: BlockValues) -> "AttentionView":
        """Returns the view for one block, given its slice of the values."""
        mask, bias = self.mask, self.bias
        if values.reach is not None and self.distance is not None:
            assert not isinstance(mask, CausalMask)  # no fused kernel has windows
            near = (self.distance < values.reach)[:, None]  # [R, 1, Q, S]
            mask = near if mask is None else mask & near
        if values.bias_table is not None and self.buckets is not None:
            bias = bias_of_buckets(values.bias_table, self.buckets)
        return self._replace(mask=mask, bias=bias, distance=None, buckets=None)

    def with_mask_array(self, length: int) -> "AttentionView":
        """Returns the view of a source of `length` keys, with its mask as an array."""
        if not isinstance(self.mask, CausalMask):
            return self
        return self._replace(mask=self.mask.array(length))

    def attention_source(self, key_values: KeyValues) -> AttentionSource:
        """Combines this view with one block's keys and values."""
        if self.rows is not None:
            selected = (_select_rows(part, self.rows) for part in key_values)
            key_values = KeyValues(*selected)
        return AttentionSource(key_values, self.mask, self.bias)


def bias_of_buckets(
    table: Float[Array, "H buckets"], buckets: Int[Array, "#R Q S"]
) -> Float[Array, "#R H Q S"]:
    """Looks up each head's bias for the bucket of each query and key."""
    # A product with a one-hot array is faster than looking up `Q * S` numbers.
    hot = jax.nn.one_hot(buckets, table.shape[-1], dtype=table.dtype)
    return jnp.einsum("rqsb,hb->rhqs", hot, table)  # [R, Q, S, buckets] before


def _select_rows(
    part: Shaped[Array, "G N S K"], rows: Array
) -> Shaped[Array, "G R _ K"]:
    """Selects one of `N` rows for each of `R`, or a few, concatenated on `S`."""
    selected = part[:, rows]  # [G, R, S, K] or [G, R, n, S, K]
    return selected.reshape(len(part), len(rows), -1, part.shape[-1])


class StreamView(NamedTuple):
    """Description of one stream for a block.

    Attributes:
      shape: rows and positions on this device, `(R, Q)`.
      self_views: sources of self-attention: what precedes the stream, then the stream.
      cross_views: sources of cross-attention: an encoder's outputs.
      first_row: index in the whole batch of the first row.
      rows: number of rows in the whole batch.
      state: how it continues recurrent states; None without such layers.
      relative: vectors of its relative positions, or None.
    """

    shape: tuple[int, int]
    self_views: tuple[AttentionView, ...]
    cross_views: tuple[AttentionView, ...]
    first_row: Int[Array, ""] | int
    rows: int
    state: StateView | None = None
    relative: RelativePositions | None = None

    def in_block(self, values: BlockValues) -> "StreamView":
        """Returns the view for one block, given its slice of the values."""
        return self._replace(
            self_views=tuple(view.in_block(values) for view in self.self_views)
        )


def mask_of_rows(mask: ContextMask, rows: int) -> ContextMask:
    """Repeats a mask with fewer rows, each for consecutive rows."""
    if mask is None or len(mask) in (1, rows):
        return mask
    return jnp.repeat(mask, rows // len(mask), axis=0)


def key_count(streams: Sequence[Stream], past: Sequence[Context]) -> int:
    """Returns how many keys each position of the last stream attends to."""
    *first_streams, last = streams
    earlier = [(x.rows, _length(x.key_values)) for x in past]
    earlier += [(x.context_rows, x.hidden.shape[1]) for x in first_streams]
    count = last.hidden.shape[1]
    for rows, length in earlier:
        count += length if rows is None or rows.ndim == 1 else length * rows.shape[1]
    return count


def _length(source: KeyValues | Array) -> int:
    part = source.keys if isinstance(source, KeyValues) else source
    return part.shape[-2]


def position_numbers(views: Sequence[StreamView]) -> Int[Array, "n"]:
    """Numbers the positions of all streams as in the whole batch, on any mesh."""
    numbers, start = [], 0
    for view in views:
        rows, length = view.shape
        # `start` counts the positions of earlier streams in the whole batch.
        first = start + view.first_row * length
        numbers.append(first + jnp.arange(rows * length))
        start += view.rows * length
    return jnp.concatenate(numbers)


def flatten_streams(
    parts: Sequence[Shaped[Array, "_ _ *rest"]],
) -> Shaped[Array, "n *rest"]:
    """Concatenates the positions of all streams: `[R, Q, ...]` each, to `[n, ...]`."""
    flat = [part.reshape(-1, *part.shape[2:]) for part in parts]
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat)


def split_streams(
    flat: Shaped[Array, "n *rest"], views: Sequence[StreamView]
) -> list[Shaped[Array, "_ _ *rest"]]:
    """Inverts `flatten_streams`."""
    bounds = np.cumsum([math.prod(view.shape) for view in views])[:-1].tolist()
    parts = jnp.split(flat, bounds) if bounds else [flat]
    return [
        part.reshape(*view.shape, *part.shape[1:])
        for part, view in zip(parts, views, strict=True)
    ]


def apply_block_inputs(
    hidden: Float[Array, "n D"],
    views: Sequence[StreamView],
    block_input: Sequence[BlockInput | None],
    values: Sequence[Any],
) -> Float[Array, "n D"]:
    """Applies each stream's `BlockInput` to the hidden states that enter a block."""
    if not any(block_input):
        return hidden
    parts = [
        part if entry is None else entry.apply(part, value)
        for part, entry, value in zip(
            split_streams(hidden, views), block_input, values, strict=True
        )
    ]
    return flatten_streams(parts)


def state_view(
    streams: Sequence[Stream], index: int, past: Sequence[Context]
) -> StateView:
    """Returns how a stream continues the states before it."""
    stream, rows = streams[index], None
    if index:
        rows = streams[index - 1].context_rows
    elif known := [context for context in past if context.state is not None]:
        rows = known[-1].rows
    length = stream.hidden.shape[1]
    return StateView.create(rows, length, stream.segments, stream.lengths)


def kept_by_stream(
    kept: Mapping[str, tuple[Any, ...]],
) -> tuple[Kept, ...]:
    """Regroups by stream what blocks keep by the names in `kept_by`."""
    states = [parts for name, parts in kept.items() if name in MIXERS]
    return tuple(map(Kept, kept[KEYS], *states))
