"""Compares the divisor of a batch's sum with a manual count."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.core.batch import Batch
from prompt_tuning.losses.normalizers import NORMALIZERS, constant_normalizer

# Two rows with room for five targets; one of the second has weight 0.5.
BATCH = Batch(
    tokens=np.zeros((2, 5), np.int32),
    lengths=np.array([5, 3], np.int32),
    targets=np.zeros((2, 5), np.int32),
    loss_positions=np.array([[1, 2, 4], [2, 0, 0]], np.int32),
    loss_weights=np.array([[1, 1, 2], [0.5, 0, 0]], np.float32),
    prefix_lengths=np.ones(2, np.int32),
)
# The same four targets in one row, in the order of the rows.
PACKED = Batch(
    tokens=np.zeros((1, 9), np.int32),
    lengths=np.array([8], np.int32),
    targets=np.zeros((1, 9), np.int32),
    loss_positions=np.array([[1, 2, 4, 7, 0]], np.int32),
    loss_weights=np.array([[1, 1, 2, 0.5, 0]], np.float32),
    prefix_lengths=np.ones((1, 2), np.int32),
    segment_ids=np.array([[1, 1, 1, 1, 1, 2, 2, 2, 0]], np.int32),
)
LOSSES = np.array([[4.0, 3.0, 1.0], [6.0, 5.0, 5.0]])
PACKED_LOSSES = np.array([[4.0, 3.0, 1.0, 6.0, 5.0]])


def loss(name, batch, losses):
    normalizer = NORMALIZERS[name]

    def compute(batch, losses):
        total = jnp.sum(normalizer.weights(batch) * losses)
        return total / normalizer.divisor(batch)

    return jax.jit(compute)(batch, losses)


@pytest.mark.parametrize(
    ("name", "expected", "packed"),
    [
        # (4 + 3 + 2 + 3) divided by the weight 4.5, and by all target positions.
        ("num_real_target_tokens", 12 / 4.5, 12 / 4.5),
        ("num_total_target_tokens", 12 / 10, 12 / 9),
        # The means are 9 / 4 and 6 in any row.
        ("average_per_sequence", (9 / 4 + 6) / 2, (9 / 4 + 6) / 2),
    ],
)
def test_each_normalizer_equals_a_manual_count(name, expected, packed):
    np.testing.assert_allclose(loss(name, BATCH, LOSSES), expected, rtol=1e-6)
    np.testing.assert_allclose(loss(name, PACKED, PACKED_LOSSES), packed, rtol=1e-6)


def test_target_segments_precede_input_segments():
    """In a packed encoder-decoder row the inputs end at another position."""
    inputs = np.array([[1, 2, 2, 2]], np.int32)
    batch = dataclasses.replace(
        PACKED, segment_ids=inputs, target_segment_ids=PACKED.segment_ids
    )
    actual = loss("average_per_sequence", batch, PACKED_LOSSES)
    np.testing.assert_allclose(actual, (9 / 4 + 6) / 2, rtol=1e-6)


def test_a_row_without_weight_does_not_count_as_a_sequence():
    filled = jax.tree.map(lambda x: np.concatenate([x, x[:1]]), BATCH)
    filled.loss_weights[2] = 0
    losses = np.concatenate([LOSSES, LOSSES[:1]])
    actual = loss("average_per_sequence", filled, losses)
    np.testing.assert_allclose(actual, (9 / 4 + 6) / 2, rtol=1e-6)


@pytest.mark.parametrize("name", NORMALIZERS)
def test_micro_batches_are_divided_by_their_total_normalizer(name):
    cut = jax.tree.map(lambda x: x[:, None], BATCH)
    whole, parts = (NORMALIZERS[name].divisor(batch) for batch in (BATCH, cut))
    np.testing.assert_allclose(parts, whole)


def test_a_constant_normalizer_uses_the_weights_unchanged():
    chosen = constant_normalizer(8.0)
    weights = jax.jit(chosen.weights)(BATCH)
    np.testing.assert_array_equal(weights, BATCH.loss_weights)
    assert chosen.divisor(BATCH) == 8
