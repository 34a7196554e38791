"""Packs many examples into a row: batches of one shape with little padding."""

import bisect
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64, Integer

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.batching import batch_plan, buckets

EXAMPLES_PER_ROW = 4
"""Average number of examples in a row of the default length: enough to fill the rows,
but small, because attention scores are computed between all tokens of a row."""

SPREADS = (1.125, 1.25)
"""Factors by which the counted targets of a row may exceed an even distribution."""

PAIR_COSTS = (1, 1)
"""Relative costs of an input and a target in an encoder-decoder, as in `BucketPlan`."""

COUNT_MULTIPLE = 4
"""Target counts are rounded up to multiples of it, so that more examples are equal."""

TRIED_SPACES = 16
"""Number of sizes of free space to try for an example before a new row is begun."""


class PackedPlan(batch_plan.BatchPlan):
    """Batches of rows with many examples each, one after the other, all of one shape.

    Rows are packed by best fit, the longest examples first (Johnson 1974, best-fit
    decreasing), which needs few rows, and equally many in every epoch. Shuffling
    exchanges examples with equal lengths and equal numbers of counted targets, and
    reorders the rows. Counted targets are the learned ones in a decoder-only model, and
    all targets in an encoder-decoder, where the inputs of a row fit in `T` and the
    targets in `U`.

    Attributes:
      length: `T`, length of every row.
    """

    def __init__(
        self,
        input_lengths: Integer[np.ndarray, "E"],
        weight_counts: Integer[np.ndarray, "E"],
        *,
        target_lengths: Integer[np.ndarray, "E"] | None = None,
        length: int | None = None,
        **settings: Any,
    ):
        """Packs the examples; `settings` are those of `BatchPlan`.

        An encoder-decoder has `target_lengths`; in a decoder-only model the inputs are
        the targets. Rows have the `length` `T`; None for four times the average length,
        at least the longest.
        """
        same_tokens = target_lengths is None
        super().__init__(input_lengths, same_tokens=same_tokens, **settings)
        self.length = row_length(input_lengths, length, self._maximum_length)
        if same_tokens:
            packing = pack_decoder_only(input_lengths, weight_counts, self.length)
        else:
            packing = pack_pairs(input_lengths, target_lengths, self.length)
        self._rows, self._kinds = packing.rows, packing.kinds
        self._order = np.argsort(self._kinds, kind="stable")
        targets = self.length if same_tokens else packing.positions
        self._shape = batch_plan.BatchShape(self.length, targets, packing.positions)
        tokens = self.length if same_tokens else self.length + targets
        limit = self._size.limit(tokens)
        if not self._shuffle or self._size.tokens is not None:
            limit = min(limit, max(len(self._rows) // self.accumulate, 1))
        self._batch_rows = limit * self.accumulate

    def _compute_epoch(self, random: np.random.Generator) -> batch_plan.Epoch:
        rows = self._exchange_examples(random) if self._shuffle else self._rows
        missing = -len(rows) % self._batch_rows
        rows = np.pad(rows, ((0, missing), (0, 0)), constant_values=batch_plan.FILLING)
        batches = list(rows.reshape(-1, self._batch_rows, rows.shape[1]))
        return batch_plan.Epoch(batches, [self._shape] * len(batches))

    def _exchange_examples(
        self, random: np.random.Generator
    ) -> Int64[np.ndarray, "R n"]:
        shuffled = np.lexsort((random.random(self.examples), self._kinds))
        # [E + 1]: the last entry maps FILLING, -1, to itself.
        replacements = np.full(self.examples + 1, batch_plan.FILLING)
        replacements[self._order] = shuffled
        return replacements[random.permutation(self._rows)]


def row_length(
    input_lengths: Integer[np.ndarray, "E"],
    packed_length: int | None = None,
    maximum_length: int | None = None,
) -> int:
    """Returns the length of packed rows: as configured, or of four average examples."""
    longest = int(input_lengths.max())
    if packed_length is None:
        total = EXAMPLES_PER_ROW * int(input_lengths.sum())
        length = buckets.round_up(max(longest, -(-total // len(input_lengths))))
        return length if maximum_length is None else min(length, maximum_length)
    if packed_length < longest:
        raise InputError(
            f"packed_length is {packed_length}, but the longest example has {longest} "
            "tokens, and examples are not split: expected at least as many"
        )
    if maximum_length is not None and packed_length > maximum_length:
        raise InputError(
            f"packed_length is {packed_length}, expected at most {maximum_length}, the "
            "model's positions minus the prompt vectors"
        )
    return packed_length


class PackedRows(NamedTuple):
    """`E` examples packed into `R` rows of at most `n` examples.

    Attributes:
      rows: numbers of the examples in a row, `FILLING` after the last.
      kinds: kind by example; examples of the same kind can be exchanged.
      positions: maximum number of counted targets of a row, after any exchange: `m`,
        and in an encoder-decoder `U` too; a multiple of 8, or the rows' length.
    """

    rows: Int64[np.ndarray, "R n"]
    kinds: Int64[np.ndarray, "E"]
    positions: int


def pack_decoder_only(
    input_lengths: Integer[np.ndarray, "E"],
    weight_counts: Integer[np.ndarray, "E"],
    length: int,
) -> PackedRows:
    """Packs the examples of a decoder-only model, which learns some of the targets.

    Returns the cheapest of three packings. The more evenly the learned targets are
    distributed over the rows, the fewer positions they need, but the more rows; the
    last packing considers only lengths.
    """
    counts = np.minimum(_round_counts(weight_counts), input_lengths)
    return _cheapest(
        input_lengths,
        counts,
        length,
        length,
        (batch_plan.TOKEN_COST, batch_plan.TARGET_COST),
    )


def pack_pairs(
    input_lengths: Integer[np.ndarray, "E"],
    target_lengths: Integer[np.ndarray, "E"],
    length: int,
) -> PackedRows:
    """Packs inputs and targets into separate rows; see `pack_decoder_only`."""
    counts = _round_counts(target_lengths)
    return _cheapest(
        input_lengths, counts, length, buckets.round_up(int(counts.sum())), PAIR_COSTS
    )


def _round_counts(targets: Integer[np.ndarray, "E"]) -> Integer[np.ndarray, "E"]:
    return -(-targets // COUNT_MULTIPLE) * COUNT_MULTIPLE


def _cheapest(
    input_lengths: Integer[np.ndarray, "E"],
    counts: Integer[np.ndarray, "E"],
    length: int,
    maximum_count: int,
    costs: tuple[int, int],
) -> PackedRows:
    even = length * int(counts.sum()) / int(input_lengths.sum())
    limits = [max(int(spread * even), int(counts.max())) for spread in SPREADS]
    packings = []
    for limit in sorted({min(x, maximum_count) for x in (*limits, maximum_count)}):
        rows = _best_fit(input_lengths, counts, length, limit)
        largest = max(int(counts[row].sum()) for row in rows)
        positions = min(buckets.round_up(largest), maximum_count)
        cost = len(rows) * (costs[0] * length + costs[1] * positions)
        packings.append((cost, positions, rows))
    _, positions, rows = min(packings, key=lambda packing: packing[:2])
    table = np.full((len(rows), max(map(len, rows))), batch_plan.FILLING)
    for number, row in enumerate(rows):
        table[number, : len(row)] = row
    pairs = np.stack([input_lengths, counts], axis=1)
    _, kinds = np.unique(pairs, axis=0, return_inverse=True)
    return PackedRows(table, kinds.reshape(-1), positions)


def _best_fit(
    input_lengths: Integer[np.ndarray, "E"],
    counts: Integer[np.ndarray, "E"],
    length: int,
    maximum_count: int,
) -> list[list[int]]:
    """Packs rows of at most `length` tokens and `maximum_count` counted targets.

    The longest example comes first, and goes into the fullest row that has room for it.
    """
    rows: list[list[int]] = []
    counts_left: list[int] = []  # of each row
    rows_by_space: dict[int, list[int]] = {}  # rows by their number of free tokens
    spaces: list[int] = []  # sorted keys of `rows_by_space`
    order = np.argsort(-input_lengths, kind="stable")
    table = np.stack([order, input_lengths[order], counts[order]], axis=1)
    for example, needed, count in table.tolist():
        first = bisect.bisect_left(spaces, needed)
        for space in spaces[first : first + TRIED_SPACES]:
            if counts_left[rows_by_space[space][-1]] >= count:
                row = rows_by_space[space].pop()
                if not rows_by_space[space]:
                    del rows_by_space[space]
                    spaces.remove(space)
                break
        else:
            row, space = len(rows), length
            rows.append([])
            counts_left.append(maximum_count)
        rows[row].append(example)
        counts_left[row] -= count
        space -= needed
        if space not in rows_by_space:
            rows_by_space[space] = []
            bisect.insort(spaces, space)
        rows_by_space[space].append(row)
    return rows
