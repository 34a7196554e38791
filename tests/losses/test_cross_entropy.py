import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prompt_tuning.losses.cross_entropy import token_loss
from scripts.bench import hlo
from tests.support.chunks import chunked
from tests.support.exhaustive import sample

B, M, D, V = 3, 4, 8, 11
RANDOM = np.random.default_rng(0)
HIDDEN = jnp.asarray(RANDOM.standard_normal((B, M, D)), jnp.float32)
HEAD = jnp.asarray(RANDOM.standard_normal((V, D)), jnp.float32)
TARGETS = jnp.asarray(RANDOM.integers(0, V, (B, M)))
# One is zero and some are negative, since a cotangent can be anything.
WEIGHTS = jnp.asarray(RANDOM.standard_normal((B, M)), jnp.float32).at[0, 0].set(0)


def weighted(hidden, head, targets=TARGETS):
    return jnp.sum(WEIGHTS * token_loss(hidden, head, targets).nll)


def weighted_by_optax(hidden, head, targets=TARGETS):
    nll = optax.softmax_cross_entropy_with_integer_labels(hidden @ head.T, targets)
    return jnp.sum(WEIGHTS * nll)


def test_nll_equals_optaxs():
    nll = jax.jit(token_loss)(HIDDEN, HEAD, TARGETS).nll
    expected = optax.softmax_cross_entropy_with_integer_labels(HIDDEN @ HEAD.T, TARGETS)
    np.testing.assert_allclose(nll, expected, rtol=1e-5)


def assert_equals_optax(trained):
    value, gradient = jax.jit(jax.value_and_grad(weighted, trained))(HIDDEN, HEAD)
    expected = jax.jit(jax.value_and_grad(weighted_by_optax, trained))(HIDDEN, HEAD)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=1e-5),
        gradient,
        expected[1],
    )


@pytest.mark.parametrize("trained", [0, 1, (0, 1)])
def test_the_gradient_equals_optaxs_for_any_cotangent(trained):
    assert_equals_optax(trained)


def test_a_cotangent_may_depend_on_the_loss():
    def squared(loss):
        return lambda hidden: jnp.sum(loss(hidden) ** 2)

    ours = jax.jit(jax.grad(squared(lambda h: weighted(h, HEAD))))(HIDDEN)
    theirs = jax.jit(jax.grad(squared(lambda h: weighted_by_optax(h, HEAD))))(HIDDEN)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_equal_scores_cost_the_log_of_the_vocabulary():
    loss = jax.jit(token_loss)(jnp.zeros((B, M, D)), HEAD, TARGETS)
    np.testing.assert_allclose(loss.nll, np.log(V), rtol=1e-6)


def test_large_scores_neither_overflow_nor_lose_the_difference():
    hidden, head = jnp.ones((1, 1)), jnp.array([[1000.0], [999.0]])
    nll = jax.jit(token_loss)(hidden, head, jnp.array([1])).nll
    np.testing.assert_allclose(nll, 1 + np.log1p(np.exp(-1.0)), rtol=1e-4)


def test_correct_marks_the_targets_with_the_highest_score():
    scores = jnp.array([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
    loss = jax.jit(token_loss)(scores, jnp.eye(3), jnp.array([0, 1, 1]))
    assert loss.correct.tolist() == [True, False, True]


def test_accuracy_has_no_gradient():
    def count(hidden):
        return jnp.sum(token_loss(hidden, HEAD, TARGETS).correct.astype(jnp.float32))

    gradient = jax.jit(jax.grad(count))(HIDDEN)
    np.testing.assert_array_equal(gradient, jnp.zeros_like(HIDDEN))


def test_bfloat16_hidden_states_are_summed_in_float32():
    half = jnp.asarray(HIDDEN, jnp.bfloat16)
    nll, gradient = jax.jit(
        lambda h: (token_loss(h, HEAD, TARGETS).nll, jax.grad(weighted)(h, HEAD))
    )(half)
    assert nll.dtype == jnp.float32 and gradient.dtype == jnp.bfloat16
    # The same products of the same rounded numbers, summed without further rounding.
    exact = half.astype(jnp.float32)
    head = jnp.asarray(HEAD, jnp.bfloat16).astype(jnp.float32)
    expected = optax.softmax_cross_entropy_with_integer_labels(exact @ head.T, TARGETS)
    np.testing.assert_allclose(nll, expected, rtol=1e-5)
    near = jax.jit(jax.grad(weighted_by_optax))(exact, head)
    np.testing.assert_allclose(gradient.astype(jnp.float32), near, atol=0.05)


@pytest.mark.parametrize("trained", [0, 1])
def test_no_weight_is_rounded_to_bfloat16_before_it_is_multiplied(trained):
    """bfloat16 rounds a third by 1/512, an error that all numbers would share."""

    def norm(weight):
        def loss(hidden, head):
            return weight * jnp.sum(token_loss(hidden, head, TARGETS).nll)

        half = jnp.asarray(HIDDEN, jnp.bfloat16)
        gradient = jax.jit(jax.grad(loss, trained))(half, HEAD)
        return np.linalg.norm(np.asarray(gradient, "f4"))

    assert norm(1 / 3) == pytest.approx(norm(1.0) / 3, rel=5e-4)


def test_hidden_states_without_their_targets_are_an_error():
    # Under jaxtyping its own error is raised; without it, the user's error.
    unchecked = inspect.unwrap(token_loss)
    with pytest.raises(
        ValueError, match=r"\(3, 4, 8\) and targets \(3, 3\) must agree"
    ):
        unchecked(HIDDEN, HEAD, TARGETS[:, 1:])


Z_LOSS, SMOOTHING = 0.02, 0.15
EXTRAS = [(Z_LOSS, 0.0), (0.0, SMOOTHING), (Z_LOSS, SMOOTHING)]


def optax_losses(hidden, head, targets, z_loss, smoothing):
    """Computes the formula with labels smoothed by optax and an explicit entropy."""
    logits = hidden @ head.T
    # optax distributes the smoothing over all V tokens, including the target.
    share = smoothing * V / (V - 1)
    wanted = optax.losses.smooth_labels(jax.nn.one_hot(targets, V), share)
    target_distribution = np.array([1 - smoothing, *[smoothing / (V - 1)] * (V - 1)])
    entropy = -sum(x * np.log(x) for x in target_distribution if x)
    nats = optax.losses.softmax_cross_entropy(logits, wanted) - entropy
    return nats + z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2


def test_z_loss_and_smoothing_equal_t5xs():
    """By hand: for scores 0 and log 3 the softmax is 1/4 and 3/4."""
    hidden, head = jnp.ones((1, 1)), jnp.array([[0.0], [np.log(3)]])
    loss = jax.jit(lambda h, w: token_loss(h, w, jnp.array([1]), 0.5, 0.1).nll)
    kl = 0.9 * np.log(0.9 / 0.75) + 0.1 * np.log(0.1 / 0.25)
    np.testing.assert_allclose(loss(hidden, head), kl + 0.5 * np.log(4) ** 2, rtol=1e-5)


@pytest.mark.parametrize(("z_loss", "smoothing"), sample(1, EXTRAS))
@pytest.mark.parametrize("rows", [None, 5])
def test_loss_and_gradient_with_z_loss_and_smoothing(
    monkeypatch, z_loss, smoothing, rows
):
    if rows is not None:
        chunked(monkeypatch, rows)

    def ours(hidden, head):
        losses = token_loss(hidden, head, TARGETS, z_loss, smoothing).nll
        return jnp.sum(WEIGHTS * losses), losses

    def theirs(hidden, head):
        losses = optax_losses(hidden, head, TARGETS, z_loss, smoothing)
        return jnp.sum(WEIGHTS * losses), losses

    for trained in (0, (0, 1)):
        actual, expected = (
            jax.jit(jax.grad(loss, trained, has_aux=True))(HIDDEN, HEAD)
            for loss in (ours, theirs)
        )
        for mine, other in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
            np.testing.assert_allclose(mine, other, atol=2e-5)


def test_the_gradient_equals_finite_differences():
    def loss(hidden):
        losses = token_loss(hidden, HEAD, TARGETS, Z_LOSS, SMOOTHING).nll
        return jnp.sum(WEIGHTS * losses)

    direction = jnp.asarray(
        np.random.default_rng(1).standard_normal(HIDDEN.shape), "float32"
    )
    slope = jnp.vdot(jax.jit(jax.grad(loss))(HIDDEN), direction)
    step, compute = 1e-2, jax.jit(loss)
    ahead, behind = (compute(HIDDEN + s * step * direction) for s in (1, -1))
    np.testing.assert_allclose((ahead - behind) / (2 * step), slope, rtol=2e-3)


def test_predicting_the_smoothed_target_has_zero_loss():
    target_distribution = np.where(
        np.arange(V) == 4, 1 - SMOOTHING, SMOOTHING / (V - 1)
    )
    loss = jax.jit(lambda h: token_loss(h, jnp.eye(V), jnp.array([4]), 0.0, SMOOTHING))
    nll = loss(jnp.asarray(np.log(target_distribution)[None], jnp.float32)).nll
    np.testing.assert_allclose(nll, 0, atol=1e-6)


def test_smoothing_does_not_change_accuracy():
    plain = jax.jit(token_loss)(HIDDEN, HEAD, TARGETS).correct
    smoothed = token_loss(HIDDEN, HEAD, TARGETS, Z_LOSS, SMOOTHING).correct
    np.testing.assert_array_equal(plain, smoothed)


@pytest.mark.parametrize(("trained", "expected"), [(0, 2), ((0, 1), 3)])
@pytest.mark.parametrize("extra", [(), (Z_LOSS, SMOOTHING)])
def test_a_frozen_head_has_two_matrix_products_and_a_trained_one_three(
    trained, expected, extra
):
    def loss(hidden, head, targets, weights):
        return jnp.sum(weights * token_loss(hidden, head, targets, *extra).nll)

    lowered = jax.jit(jax.value_and_grad(loss, trained)).lower(
        HIDDEN, HEAD, TARGETS, WEIGHTS
    )
    products = hlo.products(lowered.compile())
    assert [product.flops for product in products] == [2 * B * M * V * D] * expected


@pytest.mark.parametrize("rows", [1, 5, 12])
@pytest.mark.parametrize("trained", [0, (0, 1)])
def test_chunks_change_nothing(monkeypatch, rows, trained):
    chunked(monkeypatch, rows)
    assert_equals_optax(trained)


def test_no_array_has_the_logits_of_all_positions(monkeypatch):
    chunked(monkeypatch, 4)

    def loss(hidden, head):
        return jnp.sum(token_loss(hidden, head, TARGETS).nll)

    shapes = hlo.array_shapes(jax.jit(jax.grad(loss)).lower(HIDDEN, HEAD).compile())
    assert (4, V) in shapes
    assert B * M * V not in {math.prod(shape) for shape in shapes}
