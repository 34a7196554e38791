"""Lengths to pad to, chosen from the lengths that there are.

An example has two lengths that its work grows with: inputs and targets in an
encoder-decoder; inputs, and targets that carry weight, in a decoder-only model. A
bucket is a pair of lengths that both fit in.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int64, Integer

MULTIPLE = 8
"""Lengths and counts are rounded up to it, the tile that accelerators work in."""

AXES = (192, 96, 48)
"""Most lengths of either kind that are tried as a bucket's, the finest first."""

COMPARISONS = 2_000_000
"""A coarser axis is taken where more have to be kept."""

LEAST_GAIN = 200
"""A bucket must save one part in so many of all work to be worth a compiled step."""


def round_up(number: int) -> int:
    """The next multiple of 8."""
    return -(-number // MULTIPLE) * MULTIPLE


def choose_tops(
    lengths: Integer[np.ndarray, "E 2"],
    *,
    count: int,
    costs: tuple[int, int],
    maximum_length: int | None = None,
) -> Int64[np.ndarray, "b 2"]:
    """The pairs of lengths to pad to, `count` at most, that leave little padding.

    One after the other the pair is added that saves most, and then each is exchanged
    for a better one for as long as there is one (forward selection and exchange, as in
    clustering by medoids). Pairs that save next to nothing are not added. All in whole
    numbers, so that every machine chooses alike.

    Args:
      lengths: the two of each example.
      count: most pairs.
      costs: of one position of the first and of the second kind.
      maximum_length: no pair goes beyond it, nor does any example.

    Returns:
      pairs in order of cost; the last has room for every example. All are multiples of
      8, or `maximum_length`.
    """
    exact = _rounded(lengths, maximum_length)
    search, tried = _search(exact, np.array(costs))
    chosen = [len(tried) - 1]
    while len(chosen) < count:
        added, saved = search.best_addition(chosen)
        if saved * LEAST_GAIN < search.least():
            break
        chosen.append(added)
    chosen = _exchange(search, chosen)
    tops = _in_order(tried[chosen], costs)
    return _in_order(_tightened(tops, exact), costs)


def holds_all(
    lengths: Integer[np.ndarray, "E 2"], maximum_length: int | None
) -> list[int]:
    """The pair to pad to that has room for every example."""
    return _rounded(lengths, maximum_length).max(axis=0).tolist()


def bucket_of(
    lengths: Integer[np.ndarray, "E 2"], tops: Int64[np.ndarray, "b 2"]
) -> Int64[np.ndarray, "E"]:
    """The first of `tops` that each pair of lengths fits in; the last if none."""
    found = np.full(len(lengths), len(tops) - 1, np.int64)
    for bucket in reversed(range(len(tops) - 1)):
        found[(lengths <= tops[bucket]).all(axis=1)] = bucket
    return found


class _Search(NamedTuple):
    """`c` distinct pairs of lengths, and `n` pairs that may be padded to.

    Attributes:
      fits: which fit in which.
      counts: examples of each distinct pair.
      costs: of an example padded to each of the `n`.
    """

    fits: Bool[np.ndarray, "c n"]
    counts: Int64[np.ndarray, "c"]
    costs: Int64[np.ndarray, "n"]

    def paid(self, chosen: list[int]) -> Int64[np.ndarray, "c"]:
        """The cost of an example of each distinct pair, padded to the cheapest."""
        most = self.costs.max()
        return np.where(self.fits[:, chosen], self.costs[chosen], most).min(axis=1)

    def total(self, chosen: list[int]) -> int:
        """The cost of all examples."""
        return int(self.counts @ self.paid(chosen))

    def least(self) -> int:
        """The cost of all examples if any number of pairs could be chosen."""
        return self.total(list(range(len(self.costs))))

    def best_addition(self, chosen: list[int]) -> tuple[int, int]:
        """The pair that saves most beside the chosen ones, and how much it saves."""
        gains = np.maximum(self.paid(chosen)[:, None] - self.costs, 0) * self.fits
        saved = self.counts @ gains
        return int(saved.argmax()), int(saved.max())


def _search(
    exact: Int64[np.ndarray, "E 2"], costs: Int64[np.ndarray, "2"]
) -> tuple[_Search, Int64[np.ndarray, "n 2"]]:
    """What there is to choose from, as fine as can be searched soon."""
    for most in AXES:
        axes = [_axis(column, most) for column in exact.T]
        above = [
            axis[np.searchsorted(axis, column)]
            for axis, column in zip(axes, exact.T, strict=True)
        ]
        cells, counts = np.unique(np.stack(above, 1), axis=0, return_counts=True)
        if len(cells) * len(axes[0]) * len(axes[1]) <= COMPARISONS:
            break
    tried = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 2)
    fits = np.all(cells[:, None] <= tried, axis=-1)
    return _Search(fits, counts, tried @ costs), tried


def _axis(column: Int64[np.ndarray, "E"], most: int) -> Int64[np.ndarray, "_"]:
    """Lengths that are met, the longest among them, thinned evenly if many."""
    met = np.unique(column)
    if len(met) <= most:
        return met
    return met[np.arange(most) * (len(met) - 1) // (most - 1)]


def _exchange(search: _Search, chosen: list[int]) -> list[int]:
    """Exchanges pairs until none is better; never the first, which holds all."""
    chosen, before = list(chosen), None
    while before != (before := search.total(chosen)):
        for place in range(1, len(chosen)):
            others = chosen[:place] + chosen[place + 1 :]
            chosen[place], _ = search.best_addition(others)
    return chosen


def _rounded(
    lengths: Integer[np.ndarray, "E 2"], maximum_length: int | None
) -> Int64[np.ndarray, "E 2"]:
    rounded = -(-np.asarray(lengths, np.int64) // MULTIPLE) * MULTIPLE
    return rounded if maximum_length is None else np.minimum(rounded, maximum_length)


def _in_order(
    tops: Int64[np.ndarray, "n 2"], costs: tuple[int, int]
) -> Int64[np.ndarray, "b 2"]:
    """Each once, by cost, so that a pair comes before all others that it fits in."""
    distinct = np.unique(tops, axis=0)
    return distinct[np.argsort(distinct @ np.array(costs), kind="stable")]


def _tightened(
    tops: Int64[np.ndarray, "b 2"], exact: Int64[np.ndarray, "E 2"]
) -> Int64[np.ndarray, "b 2"]:
    """Each pair but the last, which holds all, lowered to what its examples need."""
    members = bucket_of(exact, tops)
    for bucket in range(len(tops) - 1):
        inside = exact[members == bucket]
        if len(inside):
            tops[bucket] = inside.max(axis=0)
    return tops
