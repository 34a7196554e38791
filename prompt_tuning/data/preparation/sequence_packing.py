"""Packs a stream of examples into sequences of one length.

Tokens are columns of one int32 array `[C, n]`: ids, types, and more, e.g. categories.
So the packer moves all columns together and interprets none.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int32, Int64, Integer

from prompt_tuning.data.preparation.preparation_settings import Packing

MAXIMUM_CELLS = 1 << 20
"""Maximum number of cells per column that are laid out at once."""

Tokens = Int32[np.ndarray, "C n"]
Sequences = Int32[np.ndarray, "C m L"]


class Packer:
    """Lays out examples one after another; batching does not affect the result.

    `padding` has a value for each column.

    Attributes:
      carry: the unfinished sequence, `[C, used]`.
      dropped: number of examples, and of tokens, that did not fit, `[2]`.
      truncated: number of truncated examples, and of tokens cut off, `[2]`.
    """

    def __init__(self, packing: Packing, length: int, padding: Int32[np.ndarray, "C"]):
        self._packing = packing
        self._length = length
        self._padding = padding
        self.carry = np.zeros((len(padding), 0), np.int32)
        self.dropped = np.zeros(2, np.int64)
        self.truncated = np.zeros(2, np.int64)

    def add(
        self, tokens: Tokens, lengths: Integer[np.ndarray, "a"]
    ) -> Iterator[Sequences]:
        """Adds examples, whose tokens are concatenated; yields full sequences."""
        at_once = max(1, MAXIMUM_CELLS // self._length)
        ends = np.cumsum(lengths, dtype=np.int64)
        for first in range(0, len(lengths), at_once):
            part = lengths[first : first + at_once]
            stop = ends[first + len(part) - 1]
            yield self._add(tokens[:, stop - part.sum() : stop], part.astype(np.int64))

    def finish(self) -> Sequences:
        """Returns the last, partly filled sequence with padding, `m` = 0 or 1."""
        used = self.carry.shape[1]
        shape = len(self._padding), 1 if used else 0, self._length
        last = np.empty(shape, np.int32)
        last[...] = self._padding[:, None, None]
        if used:
            last[:, 0, :used] = self.carry
        self.carry = self.carry[:, :0]
        return last

    def _add(self, tokens: Tokens, lengths: Int64[np.ndarray, "a"]) -> Sequences:
        breaks = self._breaks(lengths)
        if self._packing.overflow is not None:
            tokens, lengths = self._apply_overflow(tokens, lengths)
        used = self.carry.shape[1]
        if self._packing.how == "full":
            starts, end = _contiguous_starts(lengths, used)
        elif self._packing.how == "greedy":
            starts, end = _greedy_starts(lengths, used, self._length, breaks)
        else:
            starts = np.arange(len(lengths), dtype=np.int64) * self._length
            end = len(lengths) * self._length
        rows = -(-end // self._length)
        # All sequences laid out flat, [C, rows * L]: padding, then the carry, then each
        # token at the start of its example plus its offset in the example.
        grid = np.empty((len(self._padding), rows * self._length), np.int32)
        grid[...] = self._padding[:, None]
        grid[:, :used] = self.carry
        shift = starts - (np.cumsum(lengths) - lengths)
        grid[:, np.repeat(shift, lengths) + np.arange(tokens.shape[1])] = tokens
        full = end // self._length * self._length
        self.carry = grid[:, full:end].copy()
        return grid[:, :full].reshape(len(grid), -1, self._length)

    def _breaks(self, lengths: Int64[np.ndarray, "a"]) -> list[int]:
        """Returns the numbers of examples after which a sequence ends, in order."""
        if self._packing != Packing("greedy", "drop"):
            return []
        too_long = lengths > self._length
        return np.cumsum(~too_long)[too_long].tolist()

    def _apply_overflow(
        self, tokens: Tokens, lengths: Int64[np.ndarray, "a"]
    ) -> tuple[Int32[np.ndarray, "C k"], Int64[np.ndarray, "b"]]:
        too_long = lengths > self._length
        if not too_long.any():
            return tokens, lengths
        if self._packing.overflow in ("drop", "fill"):
            self.dropped += too_long.sum(), lengths[too_long].sum()
            return tokens[:, np.repeat(~too_long, lengths)], lengths[~too_long]
        excess = np.where(too_long, lengths - self._length, 0)
        self.truncated += too_long.sum(), excess.sum()
        ends = np.cumsum(lengths)
        # Offset of each token in its example, [n].
        offsets = np.arange(tokens.shape[1]) - np.repeat(ends - lengths, lengths)
        if self._packing.overflow == "truncate_left":
            keep = offsets >= np.repeat(excess, lengths)
        else:
            keep = offsets < self._length
        return tokens[:, keep], lengths - excess


def _contiguous_starts(
    lengths: Int64[np.ndarray, "a"], used: int
) -> tuple[Int64[np.ndarray, "a"], int]:
    """Returns the starts of the examples, and the end of the last, without gaps."""
    ends = used + np.cumsum(lengths)
    return ends - lengths, int(ends[-1]) if len(ends) else used


def _greedy_starts(
    lengths: Int64[np.ndarray, "a"], used: int, length: int, breaks: Sequence[int]
) -> tuple[Int64[np.ndarray, "a"], int]:
    """Returns the same, with no example across the end of a sequence; see `_breaks`."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    starts = np.empty_like(lengths)
    first, at = 0, used
    ends = [(end, True) for end in breaks] + [(len(lengths), False)]
    for end, closes in ends:
        while first < end:
            # Examples `first` to `stop - 1` fit into the room of the sequence.
            room = length - at % length
            fitting = np.searchsorted(offsets, offsets[first] + room, side="right")
            stop = min(int(fitting) - 1, end)
            starts[first:stop] = at + offsets[first:stop] - offsets[first]
            at += int(offsets[stop] - offsets[first])
            if stop < end:
                at += -at % length
            first = stop
        if closes:
            at += -at % length
    return starts, at
