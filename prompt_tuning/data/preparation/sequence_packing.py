"""Articles to sequences of one length: the seven choices, as a stream.

Tokens are columns of one int32 array `[C, n]` (ids, types, and what else there is), so
that packing moves them together and knows nothing of their meaning.
"""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Int32, Int64, Integer

from prompt_tuning.data.preparation.preparation_settings import Packing

CELLS = 1 << 20
"""Most cells of a column that are laid out at once."""

Tokens = Int32[np.ndarray, "C n"]
Sequences = Int32[np.ndarray, "C m L"]


class Packer:
    """Lays articles out one after the other; what they become depends on no batching.

    Attributes:
      carry: the sequence that is not yet full, `[C, used]`.
      dropped: articles and tokens that did not fit and were left out, `[2]`.
      truncated: articles and tokens that were cut off, `[2]`.
    """

    def __init__(self, packing: Packing, length: int, padding: Int32[np.ndarray, "C"]):
        """An empty packer.

        Args:
          packing: one of the seven choices.
          length: `L`, tokens of a sequence.
          padding: what fills each column.
        """
        self._packing = packing
        self._length = length
        self._padding = padding
        self.carry = np.zeros((len(padding), 0), np.int32)
        self.dropped = np.zeros(2, np.int64)
        self.truncated = np.zeros(2, np.int64)

    def add(
        self, tokens: Tokens, lengths: Integer[np.ndarray, "a"]
    ) -> Iterator[Sequences]:
        """Takes articles, whose tokens follow each other; gives what is full."""
        at_once = max(1, CELLS // self._length)
        ends = np.cumsum(lengths, dtype=np.int64)
        for first in range(0, len(lengths), at_once):
            part = lengths[first : first + at_once]
            stop = ends[first + len(part) - 1]
            yield self._add(tokens[:, stop - part.sum() : stop], part.astype(np.int64))

    def finish(self) -> Sequences:
        """The sequence that was begun, filled with padding, if there is one."""
        used = self.carry.shape[1]
        shape = len(self._padding), 1 if used else 0, self._length
        last = np.empty(shape, np.int32)
        last[...] = self._padding[:, None, None]
        if used:
            last[:, 0, :used] = self.carry
        self.carry = self.carry[:, :0]
        return last

    def _add(self, tokens: Tokens, lengths: Int64[np.ndarray, "a"]) -> Sequences:
        if self._packing.overflow is not None:
            tokens, lengths = self._fitted(tokens, lengths)
        used = self.carry.shape[1]
        if self._packing.how == "full":
            starts, end = _one_after_the_other(lengths, used)
        elif self._packing.how == "greedy":
            starts, end = _whole(lengths, used, self._length)
        else:
            starts = np.arange(len(lengths), dtype=np.int64) * self._length
            end = len(lengths) * self._length
        rows = -(-end // self._length)
        grid = np.empty((len(self._padding), rows * self._length), np.int32)
        grid[...] = self._padding[:, None]
        grid[:, :used] = self.carry
        shift = starts - (np.cumsum(lengths) - lengths)
        grid[:, np.repeat(shift, lengths) + np.arange(tokens.shape[1])] = tokens
        full = end // self._length * self._length
        self.carry = grid[:, full:end].copy()
        return grid[:, :full].reshape(len(grid), -1, self._length)

    def _fitted(
        self, tokens: Tokens, lengths: Int64[np.ndarray, "a"]
    ) -> tuple[Int32[np.ndarray, "C k"], Int64[np.ndarray, "b"]]:
        """Leaves out or cuts off what is longer than a sequence."""
        over = lengths > self._length
        if not over.any():
            return tokens, lengths
        if self._packing.overflow == "drop":
            self.dropped += over.sum(), lengths[over].sum()
            return tokens[:, np.repeat(~over, lengths)], lengths[~over]
        lost = np.where(over, lengths - self._length, 0)
        self.truncated += over.sum(), lost.sum()
        ends = np.cumsum(lengths)
        place = np.arange(tokens.shape[1]) - np.repeat(ends - lengths, lengths)
        if self._packing.overflow == "truncate_left":
            kept = place >= np.repeat(lost, lengths)
        else:
            kept = place < self._length
        return tokens[:, kept], lengths - lost


def _one_after_the_other(
    lengths: Int64[np.ndarray, "a"], used: int
) -> tuple[Int64[np.ndarray, "a"], int]:
    """Where each article begins, and where the last ends."""
    ends = used + np.cumsum(lengths)
    return ends - lengths, int(ends[-1]) if len(ends) else used


def _whole(
    lengths: Int64[np.ndarray, "a"], used: int, length: int
) -> tuple[Int64[np.ndarray, "a"], int]:
    """The same where no article may cross the end of a sequence."""
    begun = np.concatenate([[0], np.cumsum(lengths)])
    starts = np.empty_like(lengths)
    first, at = 0, used
    while first < len(lengths):
        room = length - at % length
        stop = int(np.searchsorted(begun, begun[first] + room, side="right")) - 1
        starts[first:stop] = at + begun[first:stop] - begun[first]
        at += int(begun[stop] - begun[first])
        if stop < len(lengths):
            at += -at % length
        first = stop
    return starts, at
