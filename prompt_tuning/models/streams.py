"""Streams of rows, and what each of them sees.

A *stream* is a set of rows that see each other alike: text, a prompt, or both joined.
What every position goes through alone runs on all streams as one `[positions, D]`;
`joined` and `apart` lead there and back.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from prompt_tuning.core.dropout import DropoutIndex
from prompt_tuning.core.masks import Count
from prompt_tuning.models.attention import AttentionSource, KeyValues
from prompt_tuning.sharding import collectives

Mask = Bool[Array, "#R 1 #Q _"] | None
ContextMask = Bool[Array, "_ 1 _ _"] | None


class BlockInput(NamedTuple):
    """What is done to a stream's hidden states as they enter each block.

    Attributes:
      values: a tree of arrays, stacked on `L`.
      apply: `f(hidden [R, Q, D], one block's values) -> hidden`.
    """

    values: Any
    apply: Callable[[Float[Array, "R Q D"], Any], Float[Array, "R Q D"]]


@dataclasses.dataclass(frozen=True)
class Stream:
    """Rows that run through the blocks together.

    Attributes:
      hidden: `[R, Q, D]`.
      positions: `[1 or R, Q]`, of the rotary embedding, the learned table or the bias.
      mask: what each position sees of its own row.
      context_mask: what later streams see of this one; None for all of it.
      context_rows: which of this stream's rows each row of a later one sees, `[R]`, or
        several of them, `[R, n]`; None where those are grouped by these, evenly and one
        group after the other.
      context_positions: of what a later stream sees; `positions` if None.
      segments: in packed rows the number of each position's example, 0 for padding.
      block_input: what is done to `hidden` as it enters each block.
      shared: whether these are prompts that the batch shares, and no rows of it.
    """

    hidden: Float[Array, "R Q D"]
    positions: Int[Array, "#R Q"]
    mask: Mask
    context_mask: ContextMask = None
    context_rows: Int[Array, "_"] | Int[Array, "_ n"] | None = None
    context_positions: Int[Array, "_ _"] | None = None
    segments: Int[Array, "R Q"] | None = None
    block_input: BlockInput | None = None
    shared: bool = False

    @property
    def row_range(self) -> collectives.IndexRange:
        """Where these rows stand in the whole batch."""
        rows = len(self.hidden)
        return (
            collectives.IndexRange(0, rows)
            if self.shared
            else collectives.row_range(rows)
        )

    @property
    def dropout_index(self) -> DropoutIndex:
        """Of `hidden` in the whole batch."""
        return DropoutIndex.for_rows(self.hidden.shape, self.row_range.first)

    def shift_positions(self, count: Count) -> "Stream":
        """The same rows behind `count` positions more."""
        return dataclasses.replace(self, positions=self.positions + count)

    def as_context(self, key_values: KeyValues) -> "Context":
        """What later streams see, once its keys and values are made."""
        return Context(
            key_values, self.context_mask, self.context_rows, self.key_positions
        )

    @property
    def key_positions(self) -> Int[Array, "_ _"]:
        """Of what later streams see of this one."""
        return (
            self.positions if self.context_positions is None else self.context_positions
        )


class Context(NamedTuple):
    """Keys and values made earlier, in all blocks, and what a stream sees of them.

    Attributes:
      key_values: `[L, N, S, G, K]`; `N` is `R`, or less where rows share them. Or of
        an encoder its output `[N, S, D]`, of which each block makes its own.
      mask: see `Stream.context_mask`.
      rows: see `Stream.context_rows`.
      positions: `[1 or N, S]`, for the relative position bias; None in cross-attention,
        which has none.
    """

    key_values: KeyValues | Array
    mask: Mask
    rows: Int[Array, "R"] | Int[Array, "R n"] | None = None
    positions: Int[Array, "_ S"] | None = None


class AttentionView(NamedTuple):
    """What a stream sees of one source, the same in every block."""

    mask: Mask
    rows: Int[Array, "R"] | Int[Array, "R n"] | None
    bias: Float[Array, "#R H Q S"] | None

    def attention_source(self, made: KeyValues) -> AttentionSource:
        """The source of one block's attention."""
        if self.rows is not None:
            made = KeyValues(*(_select_rows(part, self.rows) for part in made))
        return AttentionSource(made, self.mask, self.bias)


def _select_rows(
    part: Shaped[Array, "N S *rest"], rows: Array
) -> Shaped[Array, "R _ *rest"]:
    """What each row sees of `N`, several of them one after the other."""
    picked = part[rows]
    return picked.reshape(len(rows), -1, *part.shape[2:])


class StreamView(NamedTuple):
    """One stream to a block.

    Attributes:
      shape: rows and positions of each, here.
      itself: what it sees of itself.
      cross: what it sees of an encoder.
      first_row: the number of its first row in the whole batch.
      rows: how many rows the whole batch has.
    """

    shape: tuple[int, int]
    self_views: tuple[AttentionView, ...]
    cross_views: tuple[AttentionView, ...]
    first_row: Int[Array, ""] | int
    rows: int


def position_numbers(views: Sequence[StreamView]) -> Int[Array, "n"]:
    """A number for each position of all streams, as the whole batch counts them."""
    numbers, start = [], 0
    for view in views:
        rows, length = view.shape
        first = start + view.first_row * length
        numbers.append(first + jnp.arange(rows * length))
        start += view.rows * length
    return jnp.concatenate(numbers)


def flatten_streams(
    parts: Sequence[Shaped[Array, "_ _ *rest"]],
) -> Shaped[Array, "n *rest"]:
    """All positions of all streams, one after the other."""
    flat = [part.reshape(-1, *part.shape[2:]) for part in parts]
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat)


def split_streams(
    flat: Shaped[Array, "n *rest"], views: Sequence[StreamView]
) -> list[Shaped[Array, "_ _ *rest"]]:
    """The inverse of `joined`."""
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
    """The streams' hidden states as they enter a block."""
    if not any(block_input):
        return hidden
    parts = [
        part if entry is None else entry.apply(part, value)
        for part, entry, value in zip(
            split_streams(hidden, views), block_input, values, strict=True
        )
    ]
    return flatten_streams(parts)
