"""Chooses the lengths to pad to from the lengths of the examples.

The cost of an example grows with two lengths: the numbers of inputs and of targets in
an encoder-decoder; of inputs and of learned targets in a decoder-only model. A bucket
is a pair of lengths to pad both to.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int64, Integer

MULTIPLE = 8
"""Lengths are rounded up to a multiple of it, the tile size of accelerators."""

AXES = (192, 96, 48)
"""Maximum number of candidate lengths of each kind, from finest to coarsest."""

COMPARISONS = 2_000_000
"""Maximum size of the search; beyond it, a coarser axis is used."""

MINIMUM_GAIN = 200
"""A bucket must save at least this fraction (1 / 200) of the total cost, to be worth
the compilation of another step."""

MAXIMUM_BUCKETS = 8
"""Maximum number of buckets if their number is chosen automatically."""

SAVED_BATCHES = 4
"""If the number of buckets is chosen automatically, each must save at least the time of
this many batches of the longest examples in every pass over the data. To compile a step
takes as long as 20 to 50 such batches, and a run makes several passes."""

SAVED_BATCHES_IN_ORDER = 1
"""The same for a plan that is not shuffled, as in an evaluation, whose program has no
backward pass and is compiled several times faster."""


def round_up(number: int) -> int:
    """Rounds up to a multiple of 8."""
    return -(-number // MULTIPLE) * MULTIPLE


def choose_tops(
    lengths: Integer[np.ndarray, "E 2"],
    *,
    count: int,
    costs: tuple[int, int],
    maximum_length: int | None = None,
    saved_examples: int = 0,
) -> Int64[np.ndarray, "b 2"]:
    """Chooses at most `count` pairs of lengths to pad to that leave little padding.

    Pairs are added one by one, each time the one that saves the most, until the saving
    is negligible; then each is exchanged for a better one as long as one exists
    (forward selection and exchange, as in clustering by medoids). All arithmetic is on
    integers, so every machine makes the same choice.

    Args:
      lengths: the two lengths of every example.
      count: maximum number of pairs.
      costs: cost of one position of the first and of the second kind.
      maximum_length: maximum of both lengths, which no example exceeds.
      saved_examples: a pair must save the cost of this many of the longest examples.

    Returns:
      Pairs in order of cost; every example fits in the last. Lengths are multiples of
      8, or `maximum_length`.
    """
    rounded = _round_up_all(lengths, maximum_length)
    search, candidates = _build_search(rounded, np.array(costs))
    chosen = [len(candidates) - 1]
    worthwhile = saved_examples * int(search.costs[-1])
    while len(chosen) < count:
        added, saved = search.best_addition(chosen)
        if saved * MINIMUM_GAIN < search.minimum() or saved < worthwhile:
            break
        chosen.append(added)
    chosen = _exchange(search, chosen)
    tops = _sort_by_cost(candidates[chosen], costs)
    return _sort_by_cost(_tighten(tops, rounded), costs)


def largest_pair(
    lengths: Integer[np.ndarray, "E 2"], maximum_length: int | None
) -> list[int]:
    """Returns the smallest pair to pad to that every example fits in."""
    return _round_up_all(lengths, maximum_length).max(axis=0).tolist()


def assign_buckets(
    lengths: Integer[np.ndarray, "E 2"], tops: Int64[np.ndarray, "b 2"]
) -> Int64[np.ndarray, "E"]:
    """Returns the first of `tops` that each pair of lengths fits in, else the last."""
    buckets = np.full(len(lengths), len(tops) - 1, np.int64)
    for bucket in reversed(range(len(tops) - 1)):
        buckets[(lengths <= tops[bucket]).all(axis=1)] = bucket
    return buckets


class _Search(NamedTuple):
    """`c` distinct pairs of lengths, and `n` candidate pairs to pad them to.

    `fits` tells which pair fits in which candidate, `counts` how many examples have a
    pair, and `costs` the cost of one example padded to a candidate.
    """

    fits: Bool[np.ndarray, "c n"]
    counts: Int64[np.ndarray, "c"]
    costs: Int64[np.ndarray, "n"]

    def example_costs(self, chosen: list[int]) -> Int64[np.ndarray, "c"]:
        """Returns the cost of one example by pair, in its cheapest chosen candidate."""
        maximum = self.costs.max()
        costs = np.where(self.fits[:, chosen], self.costs[chosen], maximum)  # [c, k]
        return costs.min(axis=1)

    def total(self, chosen: list[int]) -> int:
        return int(self.counts @ self.example_costs(chosen))

    def minimum(self) -> int:
        """Returns the cost of all examples if every candidate were chosen."""
        return self.total(list(range(len(self.costs))))

    def best_addition(self, chosen: list[int]) -> tuple[int, int]:
        """Returns the candidate that saves the most if added, and its saving."""
        costs = self.example_costs(chosen)
        gains = np.maximum(costs[:, None] - self.costs, 0) * self.fits  # [c, n]
        saved = self.counts @ gains
        return int(saved.argmax()), int(saved.max())


def _build_search(
    rounded: Int64[np.ndarray, "E 2"], costs: Int64[np.ndarray, "2"]
) -> tuple[_Search, Int64[np.ndarray, "n 2"]]:
    """Builds the candidates, as finely as can be searched quickly."""
    for size in AXES:
        axes = [_axis(column, size) for column in rounded.T]
        # [E, 2]: each example's lengths, rounded up to the axes.
        above = [
            axis[np.searchsorted(axis, column)]
            for axis, column in zip(axes, rounded.T, strict=True)
        ]
        pairs, counts = np.unique(np.stack(above, 1), axis=0, return_counts=True)
        if len(pairs) * len(axes[0]) * len(axes[1]) <= COMPARISONS:
            break
    candidates = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 2)
    fits = np.all(pairs[:, None] <= candidates, axis=-1)  # [c, n]
    return _Search(fits, counts, candidates @ costs), candidates


def _axis(column: Int64[np.ndarray, "E"], size: int) -> Int64[np.ndarray, "_"]:
    """Returns at most `size` of the distinct lengths, evenly, including the longest."""
    distinct = np.unique(column)
    if len(distinct) <= size:
        return distinct
    return distinct[np.arange(size) * (len(distinct) - 1) // (size - 1)]


def _exchange(search: _Search, chosen: list[int]) -> list[int]:
    """Exchanges candidates until none improves; never the first, which fits all."""
    chosen, before = list(chosen), None
    while before != (before := search.total(chosen)):
        for position in range(1, len(chosen)):
            others = chosen[:position] + chosen[position + 1 :]
            chosen[position], _ = search.best_addition(others)
    return chosen


def _round_up_all(
    lengths: Integer[np.ndarray, "E 2"], maximum_length: int | None
) -> Int64[np.ndarray, "E 2"]:
    rounded = -(-np.asarray(lengths, np.int64) // MULTIPLE) * MULTIPLE
    return rounded if maximum_length is None else np.minimum(rounded, maximum_length)


def _sort_by_cost(
    tops: Int64[np.ndarray, "n 2"], costs: tuple[int, int]
) -> Int64[np.ndarray, "b 2"]:
    """Sorts distinct pairs by cost: a pair comes before all pairs that it fits in."""
    distinct = np.unique(tops, axis=0)
    return distinct[np.argsort(distinct @ np.array(costs), kind="stable")]


def _tighten(
    tops: Int64[np.ndarray, "b 2"], rounded: Int64[np.ndarray, "E 2"]
) -> Int64[np.ndarray, "b 2"]:
    """Lowers all pairs but the last, which fits all, to what their examples need."""
    members = assign_buckets(rounded, tops)
    for bucket in range(len(tops) - 1):
        inside = rounded[members == bucket]
        if len(inside):
            tops[bucket] = inside.max(axis=0)
    return tops
