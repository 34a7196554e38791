from typing import Any

import numpy as np
import pytest

from prompt_tuning.data.plan import LENGTH_BUCKETS, BatchPlan, bucket_tops
from prompt_tuning.errors import InputError

RANDOM = np.random.default_rng(0)
LENGTHS = RANDOM.integers(1, 300, 1001)
COUNTS = np.minimum(LENGTHS, RANDOM.integers(1, 40, 1001))


def decoder_plan(lengths: Any = LENGTHS, counts: Any = COUNTS, **choices):
    choices = {"batch_size": 16, "seed": 7, "same_tokens": True} | choices
    tables = [np.array(table, np.int64) for table in (lengths, lengths, counts)]
    return BatchPlan(*tables, **choices)


def rows_of(batches):
    return np.concatenate([batch.rows for batch in batches])


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("batch_size", [1, 16, 64, 1001, 2000])
def test_every_row_is_planned_once_an_epoch(shuffle, batch_size):
    plan = decoder_plan(batch_size=batch_size, shuffle=shuffle)
    assert plan.batches_per_epoch == -(-1001 // batch_size)
    for epoch in (0, 1, 5):
        first = epoch * plan.batches_per_epoch
        batches = [plan.batch(first + i) for i in range(plan.batches_per_epoch)]
        rows = rows_of(batches)
        assert len(rows) == plan.batches_per_epoch * batch_size
        assert sorted(rows[rows >= 0]) == list(range(1001))
        assert (rows == -1).sum() == len(rows) - 1001


def test_only_one_batch_of_an_epoch_has_filling():
    batches = list(decoder_plan().one_pass())
    assert sum((batch.rows < 0).any() for batch in batches) == 1
    assert sum((batch.rows < 0).sum() for batch in batches) == 16 * 63 - 1001


def test_rows_fit_the_shape_of_their_batch():
    plan = decoder_plan()
    for index in range(plan.batches_per_epoch * 2):
        batch = plan.batch(index)
        rows = batch.rows[batch.rows >= 0]
        assert LENGTHS[rows].max() <= batch.input_length == batch.target_length
        assert COUNTS[rows].max() <= batch.positions <= batch.target_length
        assert batch.positions % 8 == 0


def test_there_are_at_most_as_many_shapes_as_buckets():
    plan = decoder_plan(length_buckets=(64, 128, 256))
    shapes = plan.shapes()
    assert [shape.input_length for shape in shapes] == [64, 128, 256, 304]
    met = {
        (batch.input_length, batch.target_length, batch.positions)
        for batch in map(plan.batch, range(3 * plan.batches_per_epoch))
    }
    assert met == set(shapes)


def test_batches_hold_rows_of_one_bucket_and_what_those_below_left():
    # 5 rows of the first bucket, 4 of the second, batches of 4.
    lengths = [10, 11, 12, 13, 14, 20, 21, 22, 23]
    plan = decoder_plan(lengths, [1] * 8 + [9], batch_size=4, shuffle=False)
    found = [(b.rows.tolist(), b.input_length, b.positions) for b in plan.one_pass()]
    assert found == [
        ([0, 1, 2, 3], 16, 8),
        ([4, 5, 6, 7], 24, 16),
        ([8, -1, -1, -1], 24, 16),
    ]


def test_positions_of_a_bucket_count_only_rows_that_can_fall_in_it():
    # The first bucket fills its batch, so its 16 positions stay below.
    plan = decoder_plan([16] * 4 + [32] * 4, [16] * 4 + [2] * 4, batch_size=4)
    assert plan.shapes() == [(16, 16, 16), (32, 32, 8)]
    # One of its rows goes up: which one depends on the epoch, so all count.
    plan = decoder_plan([16] * 5 + [32] * 3, [16] * 5 + [2] * 3, batch_size=4)
    assert plan.shapes() == [(16, 16, 16), (32, 32, 16)]
    # A bucket without a batch hands on what it got.
    plan = decoder_plan([16, 32, 64, 64], [12, 1, 1, 1], batch_size=4)
    assert plan.shapes() == [(64, 64, 16)]


def test_an_encoder_decoder_pads_targets_to_its_buckets_longest():
    plan = BatchPlan(
        np.array([16, 16, 30, 30]),
        np.array([3, 9, 40, 2]),
        np.array([3, 9, 40, 2]),
        batch_size=2,
        seed=0,
        same_tokens=False,
    )
    assert plan.shapes() == [(16, 16, 16), (32, 40, 40)]


def test_a_plan_follows_from_table_and_seed_alone():
    plan, again = decoder_plan(), decoder_plan()
    for index in (200, 3, 64, 0, 200, 62):
        np.testing.assert_array_equal(plan.batch(index).rows, again.batch(index).rows)
    other = decoder_plan(seed=8)
    assert not np.array_equal(rows_of(plan.one_pass()), rows_of(other.one_pass()))


def test_a_resumed_run_meets_the_batches_that_come_next():
    whole = [decoder_plan().batch(index).rows for index in range(150)]
    resumed = decoder_plan()
    for index in range(97, 150):
        np.testing.assert_array_equal(resumed.batch(index).rows, whole[index])


def test_each_shuffled_epoch_has_its_own_order():
    plan = decoder_plan()
    epochs = [
        rows_of(map(plan.batch, range(start, start + 63))).tolist() for start in (0, 63)
    ]
    assert epochs[0] != epochs[1]
    fixed = decoder_plan(shuffle=False)
    np.testing.assert_array_equal(fixed.batch(5).rows, fixed.batch(5 + 63).rows)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_shares_of_processes_make_up_the_batch(accumulate):
    whole = decoder_plan(accumulate=accumulate)
    shares = [
        decoder_plan(accumulate=accumulate, process_index=i, process_count=4)
        for i in range(4)
    ]
    for index in (0, 5, 130):
        expected = whole.batch(index)
        parts = [share.batch(index) for share in shares]
        joined = np.concatenate(
            [part.rows.reshape(accumulate, 4) for part in parts], axis=1
        )
        np.testing.assert_array_equal(joined.reshape(-1), expected.rows)
        assert {part.input_length for part in parts} == {expected.input_length}
        assert {part.positions for part in parts} == {expected.positions}


def test_buckets_end_at_the_longest_row():
    assert bucket_tops((16, 32, 64, 1024), 41).tolist() == [16, 32, 48]
    assert bucket_tops((16, 32), 41).tolist() == [16, 32, 48]
    assert bucket_tops((16, 32), 16).tolist() == [16]
    assert bucket_tops((16, 32), 3).tolist() == [8]
    # Positions end where the model's do, even off a multiple of 8.
    assert bucket_tops((16, 32), 41, 42).tolist() == [16, 32, 42]
    assert list(LENGTH_BUCKETS) == sorted(set(LENGTH_BUCKETS))


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"accumulate": 0}, "accumulate 0, expected at least 1"),
        ({"process_count": 3}, "batch_size is 16, expected a multiple of 3"),
        ({"process_index": 1}, "process 1 of 1"),
        ({"length_buckets": ()}, r"length_buckets are \[\], expected increasing"),
        ({"length_buckets": (32, 16)}, r"length_buckets are \[32, 16\]"),
        ({"maximum_length": 100}, "longest row has 299 tokens, expected at most 100"),
        ({"lengths": [], "counts": []}, "there is no row"),
        ({"lengths": [3, 0], "counts": [1, 1]}, "row 1 has 0 inputs"),
    ],
)
def test_plans_that_cannot_be_are_refused(choices, message):
    with pytest.raises(InputError, match=message):
        decoder_plan(**choices)


def test_there_is_no_batch_before_the_first():
    with pytest.raises(IndexError):
        decoder_plan().batch(-1)
