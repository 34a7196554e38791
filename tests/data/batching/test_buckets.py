"""Compares the chosen bucket lengths with optimal ones."""

import itertools

import numpy as np
import pytest

from prompt_tuning.data.batching.buckets import (
    assign_buckets,
    choose_tops,
    largest_pair,
    round_up,
)

RANDOM = np.random.default_rng(0)
LENGTHS = np.exp(RANDOM.normal(4, 0.5, 2000)).astype(int) + 1


def cost(lengths, tops, costs=(1, 1)):
    """Returns the cost of padding each example to the cheapest pair that fits."""
    paid = [
        min(pair @ np.array(costs) for pair in tops if (row <= pair).all())
        for row in lengths
    ]
    return sum(paid)


def both(lengths):
    return np.stack([lengths, lengths], axis=1)


def least_cost(lengths, count):
    """Returns the cost of the best multiples of 8, by dynamic programming."""
    tops, met = np.unique(-(-lengths // 8) * 8, return_counts=True)
    below = np.concatenate([[0], np.cumsum(met)])
    best = np.full(len(tops) + 1, np.inf)
    best[0] = 0
    for _ in range(count):
        best = np.array(
            [0]
            + [
                min(best[i] + (below[j] - below[i]) * tops[j - 1] for i in range(j))
                for j in range(1, len(tops) + 1)
            ]
        )
    return best[-1]


@pytest.mark.parametrize("count", [1, 2, 4, 8, 12])
def test_one_length_is_padded_almost_optimally(count):
    tops = choose_tops(both(LENGTHS), count=count, costs=(1, 1))
    assert len(tops) <= count
    assert cost(both(LENGTHS), tops) <= 1.02 * 2 * least_cost(LENGTHS, count)


def test_two_lengths_are_padded_optimally():
    lengths = RANDOM.integers(1, 33, (60, 2))
    grid = [np.array(pair) for pair in itertools.product((8, 16, 24, 32), repeat=2)]
    last = np.array(largest_pair(lengths, None))
    best = min(
        cost(lengths, [*pairs, last]) for pairs in itertools.combinations(grid, 2)
    )
    tops = choose_tops(lengths, count=3, costs=(1, 1))
    assert cost(lengths, tops) == best


def test_every_example_fits_its_bucket_and_all_fit_the_last():
    lengths = RANDOM.integers(1, 500, (3000, 2))
    tops = choose_tops(lengths, count=10, costs=(4, 1))
    assert (lengths <= tops[assign_buckets(lengths, tops)]).all()
    assert tops[-1].tolist() == [504, 504]
    assert (tops % 8 == 0).all()
    # A pair never follows one that it fits in.
    for low, high in itertools.combinations(range(len(tops)), 2):
        assert not (tops[high] <= tops[low]).all()


@pytest.mark.slow
def test_costlier_lengths_are_padded_less():
    lengths = RANDOM.integers(1, 500, (3000, 2))
    shares = []
    for costs in ((8, 1), (1, 8)):
        tops = choose_tops(lengths, count=6, costs=costs)
        padded = tops[assign_buckets(lengths, tops)].sum(axis=0)
        shares.append(lengths.sum(axis=0) / padded)
    assert shares[0][0] > shares[1][0] + 0.1
    assert shares[1][1] > shares[0][1] + 0.1


def test_equal_lengths_need_one_bucket():
    lengths = np.full((100, 2), 50)
    assert choose_tops(lengths, count=8, costs=(4, 1)).tolist() == [[56, 56]]


def test_no_bucket_goes_beyond_the_positions():
    tops = choose_tops(np.array([[41, 3]]), count=8, costs=(4, 1), maximum_length=42)
    assert tops.tolist() == [[42, 8]]


@pytest.mark.exhaustive
def test_the_choice_does_not_depend_on_the_order_of_the_table():
    lengths = RANDOM.integers(1, 9000, (5000, 2))
    expected = choose_tops(lengths, count=8, costs=(1, 1))
    tops = choose_tops(lengths[::-1], count=8, costs=(1, 1))
    np.testing.assert_array_equal(tops, expected)


def test_lengths_are_rounded_up_to_multiples_of_eight():
    assert [round_up(n) for n in (1, 7, 8, 9, 16)] == [8, 8, 8, 16, 16]
