"""Scores of classes, and their losses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prompt_tuning.losses.class_objective import (
    class_cross_entropy,
    class_hinge,
    mean_scores,
    total_scores,
)

GOLD = jnp.array([2, 0])
SCORES = jnp.array([[-1.0, -0.5, -0.4], [-3.0, -2.0, -2.5]])


@pytest.mark.parametrize(
    ("score", "expected"), [(total_scores, [-3.0, -5.0]), (mean_scores, [-1.5, -2.5])]
)
def test_a_score_is_the_log_probability_of_the_label(score, expected):
    # The third target of the first row is padding; the second weighs one half twice.
    nll = jnp.array([[1.0, 2.0, 9.0], [3.0, 4.0, 0.0]])
    weights = jnp.array([[1.0, 1.0, 0.0], [1.0, 0.5, 0.5]])
    np.testing.assert_allclose(jax.jit(score)(nll, weights), expected)


def test_the_score_of_a_filling_row_is_zero_and_has_a_gradient():
    nll, weights = jnp.full((1, 2), 7.0), jnp.zeros((1, 2))
    value, slope = jax.jit(jax.value_and_grad(lambda n: mean_scores(n, weights)[0]))(
        nll
    )
    assert value == 0
    np.testing.assert_array_equal(slope, 0)


@pytest.mark.parametrize("count", [2, 3, 7])
def test_equal_scores_cost_the_log_of_the_number_of_classes(count):
    scores = jnp.full((2, count), -1.7)
    loss = jax.jit(class_cross_entropy)(scores, jnp.array([0, count - 1]))
    np.testing.assert_allclose(loss, np.log(count), rtol=1e-6)


def test_the_cross_entropy_equals_optaxs():
    expected = optax.softmax_cross_entropy_with_integer_labels(SCORES, GOLD)
    np.testing.assert_allclose(
        jax.jit(class_cross_entropy)(SCORES, GOLD), expected, rtol=1e-6
    )


def test_the_hinge_is_the_gold_classs_shortfall_from_the_margin():
    # It leads by 0.1 in the first example and trails by 1 in the second.
    losses = jax.jit(functools.partial(class_hinge, margin=0.25))(SCORES, GOLD)
    np.testing.assert_allclose(losses, [0.15, 1.25], rtol=1e-6)


def test_the_hinge_moves_the_gold_class_and_the_best_of_the_others():
    slopes = jax.jit(jax.grad(lambda s: class_hinge(s, GOLD, 0.25).sum()))(SCORES)
    np.testing.assert_array_equal(slopes, [[0, 1, -1], [-1, 1, 0]])


def test_a_solved_example_has_zero_loss_and_gradient():
    scores, gold = jnp.array([[-1.0, -0.5, -0.75]]), jnp.array([1])
    for margin in (0.125, 0.25):  # less than the lead, and equal to it
        loss, slope = jax.jit(
            jax.value_and_grad(lambda s, m=margin: class_hinge(s, gold, m)[0])
        )(scores)
        assert loss == 0
        np.testing.assert_array_equal(slope, 0)
