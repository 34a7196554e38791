"""Several examples in one row: batches of one shape, with next to no padding."""

import bisect
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, Integer

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.batching.batch_plan import (
    FILLING,
    TARGET_COST,
    TOKEN_COST,
    BatchPlan,
    BatchShape,
    BatchSize,
    Epoch,
    Sharing,
    check_lengths,
)
from prompt_tuning.data.batching.buckets import round_up

EXAMPLES_PER_ROW = 4
"""Average examples in a row of the default length: enough for all rows to be filled,
and few, as attention scores are computed between all tokens of a row."""

SPREADS = (1.125, 1.25)
"""How far the counted targets of a row may exceed their even share of a row."""

PAIR_COSTS = (1, 1)
"""What an input and a target of an encoder-decoder cost, as in `BucketPlan`."""

COUNTED_IN = 4
"""Targets are counted in fours, for more examples to be of the same kind."""

TRIED_ROWS = 16
"""How many kinds of row with room for an example are looked at, for a new one to be
begun if none has room for its targets."""


class PackedPlan(BatchPlan):
    """Batches whose rows hold several examples each, one after the other.

    All batches have one shape. Rows are packed by best fit, the longest examples first
    (Johnson 1974, best-fit decreasing), so that an epoch is of fewest rows, and of
    equally many in every epoch; what stands together changes: examples of the same
    length, and of like many counted targets, change places at random, and the rows come
    in random order. Counted are the targets that carry weight in a decoder-only model,
    and all of them in an encoder-decoder, where a row's inputs must fit `T` and their
    targets `U`.

    Attributes:
      length: `T` of every row.
    """

    def __init__(
        self,
        input_lengths: Integer[np.ndarray, "E"],
        weight_counts: Integer[np.ndarray, "E"],
        *,
        target_lengths: Integer[np.ndarray, "E"] | None = None,
        batch_size: int | None = None,
        batch_tokens: int | None = None,
        length: int | None = None,
        seed: int,
        shuffle: bool = True,
        maximum_length: int | None = None,
        accumulate: int = 1,
        row_parts: int = 1,
    ):
        """Packs the examples.

        Args:
          input_lengths: of each example; see `Examples`.
          weight_counts: targets of each example whose weight is not zero.
          target_lengths: of each example of an encoder-decoder; None in a decoder-only
            model, whose targets are its inputs.
          batch_size: packed rows of a micro-batch.
          batch_tokens: in its place, most tokens of one, padding included (inputs and
            in an encoder-decoder targets).
          length: `T`; None for room for four average examples, and the longest.
          seed: of the order.
          shuffle: whether each epoch has an order of its own.
          maximum_length: of a row: the model's positions minus the prompt's vectors.
          accumulate: `A`, micro-batches of a batch.
          row_parts: among how many devices the rows of one are divided.

        Raises:
          InputError: if there is no example, or an argument is out of range.
        """
        check_lengths(input_lengths, maximum_length)
        sharing = Sharing(accumulate, row_parts)
        same_tokens = target_lengths is None
        super().__init__(
            len(input_lengths), seed, shuffle, sharing, same_tokens=same_tokens
        )
        self.length = row_length(input_lengths, length, maximum_length)
        if same_tokens:
            packing = pack(input_lengths, weight_counts, self.length)
        else:
            packing = pack_pairs(input_lengths, target_lengths, self.length)
        self._rows, self._kinds = packing.rows, packing.kinds
        self._order = np.argsort(self._kinds, kind="stable")
        targets = self.length if same_tokens else packing.positions
        self._shape = BatchShape(self.length, targets, packing.positions)
        tokens = self.length if same_tokens else self.length + targets
        limit = BatchSize(batch_size, batch_tokens).limit(tokens)
        if not shuffle or batch_tokens is not None:
            limit = min(limit, max(len(self._rows) // accumulate, 1))
        self._batch_rows = limit * accumulate

    def _compute_epoch(self, random: np.random.Generator) -> Epoch:
        rows = self._exchanged(random) if self._shuffle else self._rows
        missing = -len(rows) % self._batch_rows
        rows = np.pad(rows, ((0, missing), (0, 0)), constant_values=FILLING)
        batches = list(rows.reshape(-1, self._batch_rows, rows.shape[1]))
        return Epoch(batches, [self._shape] * len(batches))

    def _exchanged(self, random: np.random.Generator) -> Int64[np.ndarray, "R n"]:
        """The rows in random order, with examples of the same kind exchanged."""
        shuffled = np.lexsort((random.random(self.examples), self._kinds))
        # One entry more, for FILLING to stay what it is.
        stands_for = np.full(self.examples + 1, FILLING)
        stands_for[self._order] = shuffled
        return stands_for[random.permutation(self._rows)]


def row_length(
    input_lengths: Integer[np.ndarray, "E"],
    asked: int | None = None,
    maximum_length: int | None = None,
) -> int:
    """How long packed rows are: as asked for, or for four average examples.

    Raises:
      InputError: if the longest example does not fit, or the model has not so many
        positions.
    """
    longest, end = int(input_lengths.max()), maximum_length
    if asked is None:
        total = EXAMPLES_PER_ROW * int(input_lengths.sum())
        length = round_up(max(longest, -(-total // len(input_lengths))))
        return length if end is None else min(length, end)
    if asked < longest:
        raise InputError(
            f"packed_length is {asked}, but the longest example has {longest} tokens, "
            "and none is split: expected at least so many"
        )
    if end is not None and asked > end:
        raise InputError(
            f"packed_length is {asked}, expected at most {end}, the model's positions "
            "minus the prompt's vectors"
        )
    return asked


class PackedRows(NamedTuple):
    """A way to pack `E` examples into `R` rows of at most `n`.

    Attributes:
      rows: examples of each row, `FILLING` after the last.
      kinds: examples of the same number can change places.
      positions: room for the counted targets of any row, also after any exchange: `m`,
        and in an encoder-decoder `U` too; a multiple of 8, or the rows' length.
    """

    rows: Int64[np.ndarray, "R n"]
    kinds: Int64[np.ndarray, "E"]
    positions: int


def pack(
    input_lengths: Integer[np.ndarray, "E"],
    weight_counts: Integer[np.ndarray, "E"],
    length: int,
) -> PackedRows:
    """Packs the rows of a decoder-only model, in which some targets carry weight.

    By best fit, the longest first, in the cheapest of a few ways. The more evenly the
    targets that carry weight are spread over the rows, the less room there need be for
    them, but the more rows it may take; the last way heeds lengths alone.
    """
    counts = np.minimum(_counted(weight_counts), input_lengths)
    return _cheapest(input_lengths, counts, length, length, (TOKEN_COST, TARGET_COST))


def pack_pairs(
    input_lengths: Integer[np.ndarray, "E"],
    target_lengths: Integer[np.ndarray, "E"],
    length: int,
) -> PackedRows:
    """Packs inputs and their targets, which stand in rows of their own; see `pack`."""
    counts = _counted(target_lengths)
    return _cheapest(
        input_lengths, counts, length, round_up(int(counts.sum())), PAIR_COSTS
    )


def _counted(targets: Integer[np.ndarray, "E"]) -> Integer[np.ndarray, "E"]:
    return -(-targets // COUNTED_IN) * COUNTED_IN


def _cheapest(
    input_lengths: Integer[np.ndarray, "E"],
    counts: Integer[np.ndarray, "E"],
    length: int,
    most_room: int,
    costs: tuple[int, int],
) -> PackedRows:
    """The cheapest of a few packings, with more or less room for counted targets.

    Args:
      input_lengths: of each example.
      counts: targets of each that are counted.
      length: tokens of a row.
      most_room: more counted targets than any row may come to have.
      costs: of a token and of a counted target.
    """
    even = length * int(counts.sum()) / int(input_lengths.sum())
    rooms = [max(int(spread * even), int(counts.max())) for spread in SPREADS]
    found = []
    for room in sorted({min(room, most_room) for room in (*rooms, most_room)}):
        rows = _best_fit(input_lengths, counts, length, room)
        most = max(int(counts[row].sum()) for row in rows)
        positions = min(round_up(most), most_room)
        cost = len(rows) * (costs[0] * length + costs[1] * positions)
        found.append((cost, positions, rows))
    _, positions, rows = min(found, key=lambda packed: packed[:2])
    table = np.full((len(rows), max(map(len, rows))), FILLING)
    for number, row in enumerate(rows):
        table[number, : len(row)] = row
    pairs = np.stack([input_lengths, counts], axis=1)
    _, kinds = np.unique(pairs, axis=0, return_inverse=True)
    return PackedRows(table, kinds.reshape(-1), positions)


def _best_fit(
    input_lengths: Integer[np.ndarray, "E"],
    counts: Integer[np.ndarray, "E"],
    length: int,
    room: int,
) -> list[list[int]]:
    """Rows of examples, no more than `length` tokens and `room` counted targets each.

    Each example goes into the fullest row that it fits in, the longest example first.
    """
    rows: list[list[int]] = []
    room_left: list[int] = []
    rows_by_space: dict[int, list[int]] = {}
    spaces: list[int] = []  # those of `rows_by_space`, sorted
    order = np.argsort(-input_lengths, kind="stable")
    table = np.stack([order, input_lengths[order], counts[order]], axis=1)
    for example, needed, counted in table.tolist():
        first = bisect.bisect_left(spaces, needed)
        for space in spaces[first : first + TRIED_ROWS]:
            if room_left[rows_by_space[space][-1]] >= counted:
                row = rows_by_space[space].pop()
                if not rows_by_space[space]:
                    del rows_by_space[space]
                    spaces.remove(space)
                break
        else:
            row, space = len(rows), length
            rows.append([])
            room_left.append(room)
        rows[row].append(example)
        room_left[row] -= counted
        space -= needed
        if space not in rows_by_space:
            rows_by_space[space] = []
            bisect.insort(spaces, space)
        rows_by_space[space].append(row)
    return rows
