"""Plans of batches of similar lengths: their rows and their padding."""

from typing import Any

import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.batching.batch_plan import BucketPlan

RANDOM = np.random.default_rng(0)
LENGTHS = RANDOM.integers(1, 300, 1001)
COUNTS = np.minimum(LENGTHS, RANDOM.integers(1, 40, 1001))
QUESTIONS = np.exp(RANDOM.normal(4, 0.4, 7000)).astype(int) + 1
"""Returns lengths similar to GSM8K's questions in GPT-2's tokens."""


def decoder_plan(lengths: Any = LENGTHS, counts: Any = COUNTS, **choices):
    size = {} if "batch_tokens" in choices else {"batch_size": 16}
    choices = {"seed": 7, "same_tokens": True} | size | choices
    tables = [np.array(table, np.int64) for table in (lengths, lengths, counts)]
    return BucketPlan(*tables, **choices)


def pair_plan(inputs: Any, targets: Any, **choices):
    tables = [np.array(table, np.int64) for table in (inputs, targets, targets)]
    return BucketPlan(*tables, **({"seed": 7, "same_tokens": False} | choices))


def rows_of(batches):
    return np.concatenate([batch.rows for batch in batches])


def padding_share(plan, lengths):
    padded = sum(len(batch.rows) * batch.input_length for batch in plan.one_pass())
    return 1 - lengths.sum() / padded


@pytest.mark.parametrize(("examples", "shapes"), [(69, 1), (70, 2)])
def test_a_second_shape_must_save_four_long_batches(examples, shapes):
    # Half of the rows take 1/13 of the cost of the others: padded alone, `examples`
    # short rows save 12/13 of `examples / 16` batches of long rows.
    lengths = np.repeat([8, 104], examples)
    assert len(decoder_plan(lengths, lengths).shapes()) == shapes
    assert len(decoder_plan(lengths, lengths, buckets=2).shapes()) == 2


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    "size",
    [
        *({"batch_size": rows} for rows in (1, 16, 64, 1001, 2000)),
        *({"batch_tokens": tokens} for tokens in (304, 4096, 10**6)),
        {"batch_tokens": 4096, "accumulate": 3},
        {"batch_size": 16, "buckets": 1},
    ],
)
def test_every_example_is_planned_once_an_epoch(shuffle, size):
    plan = decoder_plan(shuffle=shuffle, **size)
    for epoch in (0, 1, 5):
        first = epoch * plan.batches_per_epoch
        batches = [plan.batch(first + i) for i in range(plan.batches_per_epoch)]
        rows = rows_of(batches)
        assert sorted(rows[rows >= 0]) == list(range(1001))
        assert sum((batch.rows < 0).any() for batch in batches) <= 1


@pytest.mark.parametrize("batch_size", [1, 16, 64, 1001, 2000])
def test_training_batches_all_have_the_requested_rows(batch_size):
    batches = list(decoder_plan(batch_size=batch_size).one_pass())
    assert {len(batch.rows) for batch in batches} == {batch_size}
    assert len(batches) == -(-1001 // batch_size)


def test_evaluation_batches_have_no_more_rows_than_the_data():
    (batch,) = decoder_plan([9] * 5, [1] * 5, shuffle=False).one_pass()
    assert batch.rows.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("batch_tokens", [304, 2048, 4096])
def test_batches_stay_within_a_token_budget(batch_tokens):
    plan = decoder_plan(batch_tokens=batch_tokens, buckets=8)
    by_length = {}
    for batch in plan.one_pass():
        rows = len(batch.rows)
        assert rows * batch.input_length <= batch_tokens
        by_length[batch.input_length] = rows
    shortest, longest = min(by_length), max(by_length)
    assert by_length[shortest] > 4 * by_length[longest]
    # Batches are as large as the limit allows if there are enough rows.
    room = batch_tokens // shortest
    short = int(np.count_nonzero(shortest >= LENGTHS))
    assert by_length[shortest] == min(room, short)


def test_the_budget_of_an_encoder_decoder_counts_inputs_and_targets():
    targets = np.minimum(RANDOM.integers(1, 200, 1001), LENGTHS)
    plan = pair_plan(LENGTHS, targets, batch_tokens=2000)
    for batch in plan.one_pass():
        assert len(batch.rows) * (batch.input_length + batch.target_length) <= 2000


def test_examples_fit_the_shape_of_their_batch():
    plan = decoder_plan()
    for index in range(plan.batches_per_epoch * 2):
        batch = plan.batch(index)
        rows = batch.rows[batch.rows >= 0]
        assert LENGTHS[rows].max() <= batch.input_length == batch.target_length
        assert COUNTS[rows].max() <= batch.positions <= batch.target_length
        assert batch.positions % 8 == batch.input_length % 8 == 0


@pytest.mark.parametrize("size", [{"batch_size": 16}, {"batch_tokens": 4096}])
def test_there_are_at_most_as_many_shapes_as_buckets(size):
    plan = decoder_plan(buckets=5, **size)
    shapes = plan.shapes()
    assert len(shapes) == 5
    assert max(shape.input_length for shape in shapes) == 304
    met = {
        (batch.input_length, batch.target_length, batch.positions)
        for batch in map(plan.batch, range(3 * plan.batches_per_epoch))
    }
    assert met == set(shapes)


def test_rows_that_fill_no_batch_move_to_a_larger_bucket():
    # 5 rows of the first bucket, 4 of the second, batches of 4.
    lengths = [10, 11, 12, 13, 14, 50, 51, 52, 53]
    plan = decoder_plan(lengths, [1] * 8 + [9], batch_size=4, shuffle=False, buckets=2)
    actual = [(b.rows.tolist(), b.input_length, b.positions) for b in plan.one_pass()]
    assert actual == [
        ([0, 1, 2, 3], 16, 8),
        ([4, 5, 6, 7], 56, 16),
        ([8, -1, -1, -1], 56, 16),
    ]


def test_rows_move_to_a_larger_bucket_only_if_both_lengths_fit():
    # Long inputs with short targets, the reverse, and a few that are long in both.
    inputs = [100] * 9 + [10] * 9 + [100] * 2
    targets = [10] * 9 + [100] * 9 + [100] * 2
    plan = pair_plan(inputs, targets, batch_size=4, buckets=3)
    actual = [(b.input_length, b.target_length) for b in plan.one_pass()]
    # One row of each of the first two remains, and forms a batch with the last two.
    assert sorted(actual) == [(16, 104)] * 2 + [(104, 16)] * 2 + [(104, 104)]
    assert sum((batch.rows < 0).sum() for batch in plan.one_pass()) == 0


def test_inputs_and_targets_are_padded_separately():
    """With one bucket per input length, half of all targets would be padding."""
    random = np.random.default_rng(1)
    inputs = np.repeat([30, 60, 120], 400)
    targets = random.choice([8, 64], 1200)
    plan = pair_plan(inputs, targets, batch_size=8, buckets=6)
    padded = sum(len(b.rows) * b.target_length for b in plan.one_pass())
    assert targets.sum() / padded > 0.95
    assert padding_share(plan, inputs) < 0.1


@pytest.mark.parametrize(
    ("choices", "most_padding"),
    [
        ({"buckets": 8}, 0.125),
        ({"buckets": 12}, 0.085),
        ({"batch_tokens": 4096, "buckets": 12}, 0.085),
        ({"shuffle": False, "buckets": 8}, 0.125),
        ({}, 0.14),
    ],
)
def test_few_shapes_leave_little_padding(choices, most_padding):
    """Random batches of 16, padded to their own longest row, are half padding."""
    order = np.random.default_rng(2).permutation(len(QUESTIONS))[:6992].reshape(-1, 16)
    random_share = QUESTIONS[order].sum() / (16 * QUESTIONS[order].max(axis=1)).sum()
    assert 0.45 < random_share < 0.55
    plan = decoder_plan(QUESTIONS, QUESTIONS, **choices)
    share = 1 - padding_share(plan, QUESTIONS)
    assert share > 1 - most_padding
    assert share / random_share > 1.6
    assert len(plan.shapes()) <= choices.get("buckets", 8)


def test_a_bucket_that_saves_nothing_is_not_compiled():
    lengths = [48] * 11 + [50] * 990
    assert decoder_plan(lengths, lengths).shapes() == [(56, 56, 56)]
    # There are never more shapes than batches.
    assert len(decoder_plan(LENGTHS[:30], COUNTS[:30]).shapes()) <= 2


def test_examples_before_a_batch_count_all_earlier_batches():
    plan = decoder_plan(batch_tokens=4096)
    met = 0
    for index in range(2 * plan.batches_per_epoch + 3):
        assert plan.examples_before(index) == met
        met += (plan.batch(index).rows >= 0).sum()


def test_a_plan_depends_only_on_table_and_seed():
    plan, again = decoder_plan(), decoder_plan()
    for index in (200, 3, 64, 0, 200, 62):
        np.testing.assert_array_equal(plan.batch(index).rows, again.batch(index).rows)
    other = decoder_plan(seed=8)
    assert not np.array_equal(rows_of(plan.one_pass()), rows_of(other.one_pass()))


def test_a_resumed_run_continues_with_the_next_batches():
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
@pytest.mark.parametrize("shuffle", [True, False])
def test_more_devices_pad_the_same_batches(accumulate, shuffle):
    choices = {"batch_tokens": 4096, "accumulate": accumulate, "shuffle": shuffle}
    alone, divided = decoder_plan(**choices), decoder_plan(**choices, row_parts=4)
    assert divided.batches_per_epoch == alone.batches_per_epoch
    for actual, expected in zip(divided.one_pass(), alone.one_pass(), strict=True):
        of_micro_batches = actual.rows.reshape(accumulate, -1)
        rows = len(expected.rows) // accumulate
        assert of_micro_batches.shape[1] == -(-rows // 4) * 4
        np.testing.assert_array_equal(
            of_micro_batches[:, :rows].reshape(-1), expected.rows
        )
        assert (of_micro_batches[:, rows:] == -1).all()
        assert actual.input_length == expected.input_length
        assert actual.positions == expected.positions


def test_no_row_is_padded_beyond_the_positions():
    plan = decoder_plan([41] * 3, [41] * 3, maximum_length=42)
    assert plan.shapes() == [(42, 42, 42)]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_tokens": 0}, "batch_tokens is 0"),
        ({"batch_tokens": 4, "batch_size": 4}, "either batch_size or batch_tokens"),
        ({"batch_size": None}, "either batch_size or batch_tokens"),
        ({"batch_tokens": 303}, "batch_tokens is 303, but .* has 304 tokens"),
        ({"accumulate": 0}, "accumulate is 0, expected at least 1"),
        ({"buckets": 0}, "buckets is 0, expected at least 1"),
        ({"maximum_length": 100}, "longest row has 299 tokens, expected at most 100"),
        ({"lengths": [], "counts": []}, "there are no rows"),
        ({"lengths": [3, 0], "counts": [1, 1]}, "row 1 has 0 inputs"),
    ],
)
def test_invalid_plans_are_refused(choices, message):
    with pytest.raises(InputError, match=message):
        decoder_plan(**choices)


def test_there_is_no_batch_before_the_first():
    with pytest.raises(IndexError):
        decoder_plan().batch(-1)
