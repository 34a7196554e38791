"""Packed rows: no example is lost or split, and there is little padding."""

from typing import Any

import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.batching.packed_plan import (
    PackedPlan,
    pack_decoder_only,
    pack_pairs,
    row_length,
)

RANDOM = np.random.default_rng(0)
LENGTHS = np.exp(RANDOM.normal(4, 0.4, 3000)).astype(int) + 1
COUNTS = np.maximum(1, (LENGTHS * RANDOM.uniform(0.2, 0.6, 3000)).astype(int))


TARGETS = np.maximum(1, (LENGTHS * RANDOM.uniform(0.1, 1.5, 3000)).astype(int))


def packed_plan(lengths=LENGTHS, counts=COUNTS, **choices):
    size: Any = {} if "batch_tokens" in choices else {"batch_size": 8}
    return PackedPlan(
        np.array(lengths, int), np.array(counts, int), **({"seed": 7} | size | choices)
    )


def epoch(plan, number=0):
    first = number * plan.batches_per_epoch
    return [plan.batch(first + i) for i in range(plan.batches_per_epoch)]


def lengths_of(rows, lengths=LENGTHS):
    """Returns the sum of each row's example lengths."""
    return np.where(rows >= 0, lengths[rows], 0).sum(axis=-1)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"batch_size": 3000},
        {"batch_tokens": 4096},
        {"length": 2048, "accumulate": 3},
    ],
)
def test_every_example_is_in_one_row_of_an_epoch(shuffle, choices):
    plan = packed_plan(shuffle=shuffle, **choices)
    for number in (0, 1, 5):
        rows = np.concatenate([batch.rows for batch in epoch(plan, number)])
        assert sorted(rows[rows >= 0]) == list(range(3000))
        assert lengths_of(rows).max() <= plan.length


def test_batches_have_one_shape_that_fits_their_rows():
    plan = packed_plan()
    (shape,) = plan.shapes()
    for batch in epoch(plan) + epoch(plan, 3):
        assert batch.rows.shape[0] == 8
        assert (batch.input_length, batch.target_length, batch.positions) == shape
        assert lengths_of(batch.rows, COUNTS).max() <= batch.positions
    assert shape.input_length == shape.target_length == plan.length


def test_packed_rows_are_nearly_full():
    rows = -(-LENGTHS.sum() // row_length(LENGTHS))
    plan = packed_plan(LENGTHS, LENGTHS, batch_size=1)
    assert plan.batches_per_epoch <= 1.03 * rows


def test_capacity_for_weighted_targets_is_slightly_above_their_mean():
    plan = packed_plan()
    share = COUNTS.sum() / LENGTHS.sum()
    assert plan.shapes()[0].positions < 1.4 * share * plan.length
    # It needs only a few rows more than packing without regard to them.
    without = packed_plan(LENGTHS, LENGTHS).batches_per_epoch
    assert plan.batches_per_epoch <= 1.03 * without


def test_wildly_uneven_targets_do_not_empty_the_rows():
    counts = np.maximum(1, (LENGTHS * RANDOM.choice([0.01, 1], 3000)).astype(int))
    plan = packed_plan(LENGTHS, counts, batch_size=1)
    assert plan.batches_per_epoch <= 1.05 * LENGTHS.sum() / plan.length


def test_the_longest_are_packed_first_into_the_fullest_row():
    # 7 begins a row; 5 does not fit in it, 3 does, and 4 fits with 5.
    lengths = np.array([3, 4, 7, 5])
    packing = pack_decoder_only(lengths, lengths, 10)
    assert packing.rows.tolist() == [[2, 0], [3, 1]]
    assert packing.positions == 10


def test_inputs_and_targets_are_packed_within_separate_limits():
    # The 3 inputs fit with 7, but their 40 targets do not: with 5 inputs there is
    # more room for them, so that all three rows have the fewest tokens.
    inputs, targets = np.array([3, 7, 5]), np.array([40, 40, 4])
    packing = pack_pairs(inputs, targets, 10)
    assert packing.rows.tolist() == [[1, -1], [2, 0]]
    assert packing.positions == 48
    # If targets are equal, the last example goes into the fullest row.
    assert pack_pairs(inputs, np.array([4, 4, 4]), 10).rows.tolist() == [
        [1, 0],
        [2, -1],
    ]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("choices", [{}, {"batch_tokens": 8192}, {"length": 1024}])
def test_packed_pairs_fit_one_shape_and_occur_once_per_epoch(shuffle, choices):
    plan = packed_plan(target_lengths=TARGETS, shuffle=shuffle, **choices)
    (shape,) = plan.shapes()
    assert shape.target_length == shape.positions
    for number in (0, 3):
        batches = epoch(plan, number)
        rows = np.concatenate([batch.rows for batch in batches])
        assert sorted(rows[rows >= 0]) == list(range(3000))
        assert lengths_of(rows).max() <= shape.input_length == plan.length
        assert lengths_of(rows, TARGETS).max() <= shape.target_length
        assert not any(batch.same_tokens for batch in batches)


def test_packed_pairs_are_nearly_full_and_targets_spread_evenly():
    plan = packed_plan(target_lengths=TARGETS, batch_size=1)
    (shape,) = plan.shapes()
    rows = plan.batches_per_epoch
    assert LENGTHS.sum() > 0.93 * rows * shape.input_length
    even = shape.input_length * TARGETS.sum() / LENGTHS.sum()
    assert shape.target_length < 1.4 * even


def test_a_token_budget_counts_targets_in_separate_rows():
    plan = packed_plan(target_lengths=TARGETS, batch_tokens=8192)
    (shape,) = plan.shapes()
    tokens = shape.input_length + shape.target_length
    assert {len(batch.rows) for batch in epoch(plan)} == {8192 // tokens}


def test_batches_stay_within_a_token_budget():
    plan = packed_plan(batch_tokens=2048, length=300)
    assert {batch.rows.shape[0] for batch in epoch(plan)} == {6}


def test_a_packed_plan_depends_only_on_table_and_seed():
    plan, again, other = packed_plan(), packed_plan(), packed_plan(seed=8)
    for index in (200, 3, 64, 0, 200):
        np.testing.assert_array_equal(plan.batch(index).rows, again.batch(index).rows)
    assert not np.array_equal(plan.batch(0).rows, other.batch(0).rows)


def test_batches_change_with_the_epoch():
    def neighbours(batches):
        return {tuple(sorted(row[row >= 0])) for batch in batches for row in batch.rows}

    plan = packed_plan(LENGTHS, LENGTHS)
    first, second = neighbours(epoch(plan)), neighbours(epoch(plan, 1))
    assert len(first & second) < 0.05 * len(first)
    fixed = packed_plan(shuffle=False)
    np.testing.assert_array_equal(
        fixed.batch(5).rows, fixed.batch(5 + fixed.batches_per_epoch).rows
    )


@pytest.mark.parametrize("accumulate", [1, 3])
def test_more_devices_pad_the_same_rows(accumulate):
    alone = packed_plan(accumulate=accumulate, batch_size=6)
    divided = packed_plan(accumulate=accumulate, batch_size=6, row_parts=4)
    for index in (0, 5, 130):
        expected = alone.batch(index).rows.reshape(accumulate, 6, -1)
        actual = divided.batch(index).rows.reshape(accumulate, 8, -1)
        np.testing.assert_array_equal(actual[:, :6], expected)
        assert (actual[:, 6:] == -1).all()


def test_examples_before_a_batch_count_all_earlier_batches():
    plan = packed_plan()
    met = 0
    for index in range(plan.batches_per_epoch + 2):
        assert plan.examples_before(index) == met
        met += (plan.batch(index).rows >= 0).sum()


def test_rows_have_room_for_four_average_examples():
    assert row_length(np.array([10, 20, 30])) == 80
    assert row_length(np.array([10, 10, 10, 90])) == 120
    assert row_length(np.array([1, 1, 1, 90])) == 96
    assert row_length(np.array([10, 20, 30]), maximum_length=50) == 50
    assert row_length(np.array([10, 20, 30]), 33) == 33


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"length": 100}, r"packed_length is 100, but the longest example has \d+ tok"),
        ({"length": 999, "maximum_length": 600}, "packed_length is 999, expected at m"),
        ({"maximum_length": 100}, "longest row has .* expected at most 100"),
        ({"batch_tokens": 100}, "batch_tokens is 100, but the longest"),
        ({"lengths": [], "counts": []}, "there are no rows"),
    ],
)
def test_invalid_packings_are_refused(choices, message):
    with pytest.raises(InputError, match=message):
        packed_plan(**choices)
