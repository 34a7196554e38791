import threading

import h5py
import jax
import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.batching.batch_plan import BucketPlan, PlannedBatch
from prompt_tuning.data.batching.batches import (
    build_batch,
    read_first_batches,
    real_token_share,
    stream_batches,
)
from prompt_tuning.data.batching.packed_plan import PackedPlan
from tests.support import prepared_rows as prepared
from tests.support.example_tables import load_for
from tests.support.prepared_rows import TUNING

LEARNED = prepared.COMPLETIONS + prepared.ROWS
REAL = prepared.PROMPTS + LEARNED
PAD = 69


@pytest.fixture
def two_rows(tmp_path):
    path = tmp_path / "rows.hdf5"
    with h5py.File(path, "w") as file:
        file["input_ids"] = [[9, 5, 6, 10, 7, 8, 2], [9, 5, 10, 2, 0, 0, 0]]
        file["token_type_ids"] = [[0, 0, 0, 1, 1, 1, 3], [0, 1, 1, 3, 2, 2, 2]]
    return path


def plan_of(examples, **choices):
    tables = examples.input_lengths, examples.target_lengths, examples.weight_counts
    return BucketPlan(*tables, **({"seed": 1, "same_tokens": True} | choices))


def test_a_decoder_only_batch(two_rows):
    examples = load_for(
        two_rows,
        architecture="decoder_only",
        tokenizer=None,
        vocabulary_size=70,
        prompt_loss_weight=0.5,
    )
    planned = PlannedBatch(np.array([1, -1, 0]), 8, 8, 8)
    batch = build_batch(examples, planned, PAD)
    expected = [
        [9, 5, 10, 2] + [PAD] * 4,
        [PAD] * 8,
        [9, 5, 6, 10, 7, 8, 2, PAD],
    ]
    assert batch.tokens.tolist() == expected
    assert batch.targets.tolist() == expected
    assert batch.lengths.tolist() == [4, 1, 7]
    assert batch.prefix_lengths.tolist() == [1, 0, 3]
    assert batch.segment_ids is batch.prompt_ids is None
    assert batch.loss_positions.tolist() == [
        [0, 1, 2, 3, 0, 0, 0, 0],
        [0] * 8,
        [0, 1, 2, 3, 4, 5, 6, 0],
    ]
    assert batch.loss_weights.tolist() == [
        [0.5, 1, 1, 1, 0, 0, 0, 0],
        [0] * 8,
        [0.5, 0.5, 0.5, 1, 1, 1, 1, 0],
    ]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(batch)} == {"int32", "float32"}
    assert real_token_share(batch) == 11 / 24


def test_a_packed_batch(two_rows):
    examples = load_for(
        two_rows, architecture="decoder_only", tokenizer=None, vocabulary_size=70
    )
    rows = np.array([[0, 1], [-1, -1], [1, -1]])
    batch = build_batch(examples, PlannedBatch(rows, 12, 12, 8), PAD)
    expected = [
        [9, 5, 6, 10, 7, 8, 2, 9, 5, 10, 2, PAD],
        [PAD] * 12,
        [9, 5, 10, 2] + [PAD] * 8,
    ]
    assert batch.tokens.tolist() == expected
    assert batch.targets.tolist() == expected
    assert batch.segment_ids.tolist() == [
        [1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 0],
        [0] * 12,
        [1, 1, 1, 1] + [0] * 8,
    ]
    assert batch.lengths.tolist() == [11, 1, 4]
    assert batch.prefix_lengths.tolist() == [[3, 1], [0, 0], [1, 0]]
    assert batch.prompt_ids is batch.target_segment_ids is None
    # The completions are tokens 3 to 6 of one example and 1 to 3 of the other.
    assert batch.loss_positions.tolist() == [
        [3, 4, 5, 6, 8, 9, 10, 0],
        [0] * 8,
        [1, 2, 3, 0, 0, 0, 0, 0],
    ]
    assert batch.loss_weights.tolist() == [[1] * 7 + [0], [0] * 8, [1] * 3 + [0] * 5]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(batch)} == {"int32", "float32"}
    assert real_token_share(batch) == 15 / 36


def test_an_encoder_decoder_batch(two_rows):
    examples = load_for(
        two_rows,
        architecture="encoder_decoder",
        tokenizer=None,
        vocabulary_size=70,
        eos_id=2,
    )
    batch = build_batch(examples, PlannedBatch(np.array([0, 1]), 4, 5, 4), PAD)
    assert batch.tokens.tolist() == [[9, 5, 6, 2], [9, 2, PAD, PAD]]
    assert batch.lengths.tolist() == [4, 2]
    assert batch.targets.tolist() == [[10, 7, 8, 2, PAD], [5, 10, 2, PAD, PAD]]
    assert batch.loss_positions.tolist() == [[0, 1, 2, 3], [0, 1, 2, 0]]
    assert batch.loss_weights.tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert batch.prefix_lengths.tolist() == [0, 0]
    assert batch.segment_ids is batch.target_segment_ids is None


def test_a_packed_encoder_decoder_batch(two_rows):
    examples = load_for(
        two_rows,
        architecture="encoder_decoder",
        tokenizer=None,
        vocabulary_size=70,
        eos_id=2,
    )
    rows = np.array([[1, 0, -1], [-1, -1, -1], [0, -1, -1]])
    planned = PlannedBatch(rows, 7, 8, 8, same_tokens=False)
    batch = build_batch(examples, planned, PAD)
    # Inputs 9 2 and 9 5 6 2; targets 5 10 2 and 10 7 8 2.
    assert batch.tokens.tolist() == [
        [9, 2, 9, 5, 6, 2, PAD],
        [PAD] * 7,
        [9, 5, 6, 2, PAD, PAD, PAD],
    ]
    assert batch.segment_ids.tolist() == [
        [1, 1, 2, 2, 2, 2, 0],
        [0] * 7,
        [1, 1, 1, 1, 0, 0, 0],
    ]
    assert batch.lengths.tolist() == [6, 1, 4]
    assert batch.targets.tolist() == [
        [5, 10, 2, 10, 7, 8, 2, PAD],
        [PAD] * 8,
        [10, 7, 8, 2, PAD, PAD, PAD, PAD],
    ]
    assert batch.target_segment_ids.tolist() == [
        [1, 1, 1, 2, 2, 2, 2, 0],
        [0] * 8,
        [1, 1, 1, 1, 0, 0, 0, 0],
    ]
    assert batch.loss_positions.tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 0],
        [0] * 8,
        [0, 1, 2, 3, 0, 0, 0, 0],
    ]
    assert batch.loss_weights.sum(axis=1).tolist() == [7, 0, 4]
    assert batch.prefix_lengths.tolist() == [[0] * 3] * 3
    assert {leaf.dtype.name for leaf in jax.tree.leaves(batch)} == {"int32", "float32"}


def test_tasks_of_rows_and_of_the_examples_of_packed_rows(two_rows):
    with h5py.File(two_rows, "a") as file:
        file["prompt_ids"] = [2, 1]
    examples = load_for(
        two_rows,
        architecture="decoder_only",
        tokenizer=None,
        vocabulary_size=70,
        prompt_count=3,
        prompt_id_key="prompt_ids",
    )
    rows = np.array([1, -1, 0])
    batch = build_batch(examples, PlannedBatch(rows, 8, 8, 8), PAD, prompt_ids=True)
    assert batch.prompt_ids.tolist() == [1, 0, 2]
    packed = PlannedBatch(np.array([[0, 1], [-1, -1], [1, -1]]), 12, 12, 8)
    batch = build_batch(examples, packed, PAD, prompt_ids=True)
    assert batch.prompt_ids.tolist() == [[2, 1], [0, 0], [1, 0]]
    assert batch.prompt_ids.dtype == np.int32
    plan = plan_of(examples, batch_size=2, shuffle=False)
    (streamed,) = stream_batches(examples, plan, 0, 1, pad_id=PAD)
    assert streamed.prompt_ids.tolist() == [2, 1]
    (halves,) = stream_batches(
        examples, plan_of(examples, batch_size=1, accumulate=2), 0, 1, pad_id=PAD
    )
    assert sorted(halves.prompt_ids.tolist()) == [[1], [2]]


def test_a_batch_passes_through_a_compiled_function(two_rows):
    examples = load_for(
        two_rows, architecture="decoder_only", tokenizer=None, vocabulary_size=70
    )
    batch = build_batch(examples, PlannedBatch(np.array([0, 1]), 8, 8, 8), PAD)
    doubled = jax.jit(lambda b: jax.tree.map(lambda leaf: 2 * leaf, b))(batch)
    assert type(doubled) is type(batch)
    np.testing.assert_array_equal(doubled.lengths, [14, 8])


@pytest.fixture(scope="module")
def tuning():
    return load_for(
        TUNING,
        architecture="decoder_only",
        tokenizer=None,
        vocabulary_size=prepared.VOCABULARY,
    )


@pytest.mark.parametrize("prefetch", [0, 4])
def test_batches_come_in_the_order_of_the_plan(tuning, prefetch):
    plan = plan_of(tuning, batch_size=8)
    stop = plan.batches_per_epoch + 3
    streamed = list(stream_batches(tuning, plan, 5, stop, pad_id=0, prefetch=prefetch))
    assert len(streamed) == stop - 5
    for index, batch in enumerate(streamed, start=5):
        expected = build_batch(tuning, plan.batch(index), 0)
        jax.tree.map(np.testing.assert_array_equal, batch, expected)


def test_every_weighted_token_occurs_once_per_pass(tuning):
    plan = plan_of(tuning, batch_size=8)
    batches = stream_batches(tuning, plan, 0, plan.batches_per_epoch, pad_id=0)
    assert sum(batch.loss_weights.sum() for batch in batches) == LEARNED


def test_buckets_leave_little_padding(tuning):
    """Without trimming the file's rows, only 42 % are real."""
    plan = plan_of(tuning, batch_size=4, buckets=8)
    batches = [build_batch(tuning, planned, 0) for planned in plan.one_pass()]
    real = sum(real_token_share(batch) * batch.tokens.size for batch in batches)
    assert round(real) == REAL
    assert real / sum(batch.tokens.size for batch in batches) > 0.75


def test_packed_rows_have_the_same_weights_and_little_padding(tuning):
    plan = PackedPlan(
        tuning.input_lengths,
        tuning.weight_counts,
        batch_size=2,
        seed=1,
        length=prepared.LENGTH,
    )
    batches = list(stream_batches(tuning, plan, 0, plan.batches_per_epoch, pad_id=0))
    assert sum(batch.loss_weights.sum() for batch in batches) == LEARNED
    real = sum((batch.segment_ids > 0).sum() for batch in batches)
    assert real == REAL
    assert real / sum(batch.tokens.size for batch in batches) > 0.9


def test_accumulated_batches_have_a_leading_axis(tuning):
    plan = plan_of(tuning, batch_size=4, accumulate=2)
    (batch,) = stream_batches(tuning, plan, 3, 4, pad_id=0)
    assert batch.tokens.shape[:2] == batch.loss_weights.shape[:2] == (2, 4)
    assert batch.lengths.shape == (2, 4)
    flat = build_batch(tuning, plan.batch(3), 0)
    np.testing.assert_array_equal(batch.tokens[1], flat.tokens[4:])


def test_errors_of_a_reading_thread_reach_the_reader(tuning, monkeypatch):
    read = type(tuning).__getitem__

    def damaged(examples, index):
        if index == 3:
            raise InputError("row 3 is damaged")
        return read(examples, index)

    monkeypatch.setattr(type(tuning), "__getitem__", damaged)
    plan = plan_of(tuning, batch_size=8)
    with pytest.raises(InputError, match="row 3 is damaged"):
        list(stream_batches(tuning, plan, 0, plan.batches_per_epoch, pad_id=0))


def test_closing_the_stream_stops_its_threads(tuning):
    before = set(threading.enumerate())
    batches = stream_batches(tuning, plan_of(tuning, batch_size=2), 0, 10**9, pad_id=0)
    next(batches)
    started = set(threading.enumerate()) - before
    assert started
    batches.close()
    for thread in started:
        thread.join(timeout=5)
        assert not thread.is_alive()


def test_one_batch_of_each_shape_is_read_in_the_order_of_use(tuning):
    plan = plan_of(tuning, batch_size=4, buckets=4)
    count = plan.batches_per_epoch
    lengths = [plan.batch(index).input_length for index in range(3, 3 + count)]
    batches = read_first_batches(tuning, plan, 3, 1000, pad_id=0)
    read = [batch.tokens.shape[1] for batch in batches]
    assert read == list(dict.fromkeys(lengths))
    assert 2 <= len(read) == len(plan.shapes())
