"""Examples of a task with classes, as rows."""

import itertools

import jax
import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.batching.batch_plan import FILLING, BucketPlan, PlannedBatch
from prompt_tuning.data.batching.batches import build_batch, stream_batches
from prompt_tuning.data.examples.class_examples import ClassExamples, label_example
from prompt_tuning.data.model_interface import ModelInterface

LABELS = [[20], [21, 22], [23, 24, 25]]
GIVEN = [[3, 4], [5], [6, 7, 8, 9], [3, 5, 7]]
GOLD = [2, 0, 1, 1]
PAD = 1


def table(architecture, *, maximum_length=None, **choices):
    model = ModelInterface(
        architecture=architecture, vocabulary_size=70, maximum_length=maximum_length
    )
    rows = [
        label_example(row, LABELS[gold], divide=architecture == "encoder_decoder")
        for row, gold in zip(GIVEN, GOLD, strict=True)
    ]
    return ClassExamples(rows, LABELS, GOLD, model, **choices)


def plan_of(examples, *, same_tokens, **choices):
    return BucketPlan(
        examples.input_lengths,
        examples.target_lengths,
        examples.weight_counts,
        seed=0,
        same_tokens=same_tokens,
        rows_per_example=examples.rows_per_example,
        **choices,
    )


def test_a_decoder_reads_each_label_after_the_prompt():
    planned = PlannedBatch(np.array([1, FILLING]), 5, 5, 3)
    batch = build_batch(table("decoder_only"), planned, PAD)
    np.testing.assert_array_equal(
        batch.tokens[:3],
        [[5, 20, 1, 1, 1], [5, 21, 22, 1, 1], [5, 23, 24, 25, 1]],
    )
    np.testing.assert_array_equal(batch.targets, batch.tokens)
    np.testing.assert_array_equal(batch.lengths, [2, 3, 4, 1, 1, 1])
    np.testing.assert_array_equal(batch.prefix_lengths, [1, 1, 1, 0, 0, 0])
    np.testing.assert_array_equal(
        batch.loss_weights[:3], [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    )
    np.testing.assert_array_equal(
        batch.loss_positions[:3], [[1, 0, 0], [1, 2, 0], [1, 2, 3]]
    )
    assert not batch.loss_weights[3:].any()
    assert batch.gold.tolist() == [0, FILLING]


def test_a_decoder_reads_the_prompt_once_for_all_labels():
    examples = table("decoder_only", share=True)
    assert examples.input_lengths.tolist() == [2, 1, 4, 3]
    assert examples.target_lengths.tolist() == [3, 3, 3, 3]
    planned = PlannedBatch(np.array([0, FILLING]), 4, 3, 3, same_tokens=False)
    batch = build_batch(examples, planned, PAD)
    np.testing.assert_array_equal(batch.tokens, [[3, 4, 1, 1], [1, 1, 1, 1]])
    np.testing.assert_array_equal(batch.lengths, [2, 1])
    np.testing.assert_array_equal(
        batch.targets[:3], [[20, 1, 1], [21, 22, 1], [23, 24, 25]]
    )
    np.testing.assert_array_equal(
        batch.loss_weights[:3], [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    )
    assert not batch.loss_weights[3:].any()
    assert batch.describe() == "2 x 4 + 3 x 3"


def test_an_encoder_reads_the_prompt_and_the_decoder_each_label():
    planned = PlannedBatch(np.array([0, 3]), 4, 3, 3)
    batch = build_batch(table("encoder_decoder"), planned, PAD)
    np.testing.assert_array_equal(batch.tokens, [[3, 4, 1, 1]] * 3 + [[3, 5, 7, 1]] * 3)
    np.testing.assert_array_equal(
        batch.targets, [[20, 1, 1], [21, 22, 1], [23, 24, 25]] * 2
    )
    np.testing.assert_array_equal(
        batch.loss_weights, [[1, 0, 0], [1, 1, 0], [1, 1, 1]] * 2
    )
    assert batch.gold.tolist() == [2, 1]


@pytest.mark.parametrize("architecture", ["decoder_only", "encoder_decoder"])
def test_the_lengths_are_the_longest_rows(architecture):
    examples = table(architecture)
    assert len(examples) == 4
    for index in range(4):
        rows = examples[index]
        actual = [
            examples.input_lengths[index],
            examples.target_lengths[index],
            examples.weight_counts[index],
        ]
        longest = [
            max(len(row.inputs) for row in rows),
            max(len(row.targets) for row in rows),
            max(np.count_nonzero(row.weights) for row in rows),
        ]
        assert actual == longest


@pytest.mark.parametrize("architecture", ["decoder_only", "encoder_decoder"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_epoch_contains_each_example_once_with_all_its_labels(
    architecture, accumulate
):
    examples = table(architecture)
    plan = plan_of(
        examples,
        same_tokens=architecture == "decoder_only",
        batch_size=3,
        accumulate=accumulate,
    )
    stop = plan.batches_per_epoch
    batches = list(stream_batches(examples, plan, 0, stop, pad_id=PAD))
    met = []
    for batch in batches:
        if accumulate == 2:
            assert batch.gold.shape == (2, 3) and batch.tokens.shape[:2] == (2, 9)
            batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
        rows = np.split(batch.tokens, len(batch.gold))
        for group, gold in zip(rows, batch.gold, strict=True):
            if gold != FILLING:
                met.append((group[0][group[0] < 20][group[0][group[0] < 20] > 1], gold))
    actual = sorted((row.tolist(), int(gold)) for row, gold in met)
    assert actual == sorted(zip(GIVEN, GOLD, strict=True))


def test_a_token_budget_limits_all_rows_together():
    examples = table("decoder_only")
    plan = plan_of(examples, same_tokens=True, batch_tokens=60)
    for planned in itertools.islice(plan.one_pass(), 9):
        batch = build_batch(examples, planned, PAD)
        assert batch.tokens.size <= 60
    with pytest.raises(InputError, match=r"batch_tokens is 23, but .* has 24 tokens"):
        plan_of(examples, same_tokens=True, batch_tokens=23)


@pytest.mark.parametrize(
    ("architecture", "room", "first"),
    [("decoder_only", 6, 2), ("encoder_decoder", 3, 2)],
)
def test_examples_that_do_not_fit_with_each_label_are_refused_or_dropped(
    architecture, room, first
):
    message = f"example {first}: 4 prompt tokens, and the longest label 3: expected"
    with pytest.raises(InputError, match=message):
        table(architecture, maximum_length=room)
    remaining = table(architecture, maximum_length=room, skip_too_long=True)
    assert len(remaining) == 3 and remaining.skipped == 1
    assert remaining.gold.tolist() == [2, 0, 1]
    assert remaining[2][0].inputs[:3].tolist() == GIVEN[3]
    with pytest.raises(InputError, match="expected at most 2 in a row"):
        table(architecture, maximum_length=2, skip_too_long=True)


def test_a_label_without_preceding_tokens_is_refused():
    rows = [label_example([], [20], divide=False)]

    def build(**choices):
        model = ModelInterface(
            architecture="decoder_only", vocabulary_size=70, **choices
        )
        return ClassExamples(rows, LABELS, [0], model)

    assert len(build()) == 1
    with pytest.raises(InputError, match="example 0 has no prompt token, and neither"):
        build(predicts_first_token=False)
