"""Losses of objectives, and the settings that they refuse."""

import dataclasses

import jax
import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.batching.batch_plan import FILLING
from prompt_tuning.losses.class_objective import ClassObjective
from prompt_tuning.losses.policy_gradient import PolicyGradient
from prompt_tuning.losses.token_objective import TokenObjective
from tests.support import dummies
from tests.support.refusals import refuses

D = 6
RANDOM = np.random.default_rng(0)
HEAD = RANDOM.standard_normal((dummies.V, D)).astype("f4")
LABELS = ["a", "b", "c"]
# Three examples, whose classes are labels of one, two and three tokens.
ROWS = [([3] * n, [4] * c) for n in (2, 5, 1) for c in (1, 2, 3)]
GOLD = np.array([1, 0, 2], np.int32)


def class_batch(gold: np.ndarray | None = GOLD):
    batch = dummies.make_batch(dummies.T5_GATED, ROWS)
    return dataclasses.replace(batch, gold=gold)


def hidden_for(batch):
    shape = (*batch.loss_weights.shape, D)
    return RANDOM.standard_normal(shape).astype("f4")


def nats(hidden):
    """Computes the loss of token 4 at every position by hand."""
    logits = hidden.astype(float) @ HEAD.T
    return np.log(np.exp(logits).sum(-1)) - logits[..., 4]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("loss", ["cross_entropy", "hinge"])
def test_the_loss_of_classes_equals_a_manual_example(loss, normalize):
    objective = ClassObjective(LABELS, loss, 0.5, normalize)
    batch = class_batch()
    hidden = hidden_for(batch)
    scores = -(batch.loss_weights * nats(hidden)).sum(-1).reshape(3, 3)
    if normalize:
        scores /= [1, 2, 3]
    gold_scores = scores[np.arange(3), GOLD]
    if loss == "cross_entropy":
        expected = np.log(np.exp(scores).sum(-1)) - gold_scores
    else:
        others = np.where(np.arange(3) == GOLD[:, None], -np.inf, scores).max(-1)
        expected = np.maximum(0, 0.5 + others - gold_scores)
    sums = jax.jit(objective.sums)(hidden, HEAD, batch)
    np.testing.assert_allclose(sums.loss, expected.sum(), rtol=1e-5)
    assert sums.correct == np.sum(scores.argmax(-1) == GOLD)
    assert sums.weight == objective.divisor(batch) == 3


@pytest.mark.parametrize("loss", ["cross_entropy", "hinge"])
def test_a_filling_example_has_no_effect(loss):
    objective = ClassObjective(LABELS, loss)
    batch = class_batch(np.array([1, 0, FILLING], np.int32))
    batch.loss_weights[6:] = 0
    hidden = hidden_for(batch)
    sums = jax.jit(objective.sums)(hidden, HEAD, batch)
    two = jax.tree.map(lambda x: x[:6], dataclasses.replace(batch, gold=None))
    alone = jax.jit(objective.sums)(
        hidden[:6], HEAD, dataclasses.replace(two, gold=GOLD[:2])
    )
    np.testing.assert_allclose(sums, alone, rtol=1e-6)
    assert sums.weight == objective.divisor(batch) == 2


def test_examples_with_classes_count_by_their_weights():
    objective = ClassObjective(LABELS)
    batch = class_batch()
    hidden = hidden_for(batch)
    sums = jax.jit(objective.sums)
    alone = [
        sums(
            hidden,
            HEAD,
            dataclasses.replace(batch, example_weights=np.eye(3, dtype="f4")[i]),
        )
        for i in range(3)
    ]
    weights = np.array([2, 0.5, 1], np.float32)
    weighted = dataclasses.replace(batch, example_weights=weights)
    expected = sum(w * x.loss for w, x in zip(weights, alone, strict=True))
    actual = sums(hidden, HEAD, weighted)
    np.testing.assert_allclose(actual.loss, expected, rtol=1e-5)
    assert actual.weight == objective.divisor(weighted) == 3.5


def test_advantages_multiply_the_loss_and_not_the_divisor():
    batch, objective = class_batch(None), PolicyGradient()
    hidden = hidden_for(batch)
    advantages = RANDOM.standard_normal(batch.loss_weights.shape).astype("f4")
    with_advantages = dataclasses.replace(batch, columns={"advantages": advantages})
    sums = jax.jit(objective.sums)(hidden, HEAD, with_advantages)
    expected = np.sum(batch.loss_weights * advantages * nats(hidden))
    np.testing.assert_allclose(sums.loss, expected, rtol=1e-4, atol=1e-4)
    assert sums.weight == objective.divisor(with_advantages) == 18
    with pytest.raises(InputError, match=r"set DataSource.advantages_key"):
        jax.jit(objective.sums)(hidden, HEAD, batch)


def test_the_soft_cap_reaches_the_loss():
    batch = class_batch(None)
    hidden = 20 * hidden_for(batch)
    sums = jax.jit(TokenObjective(soft_cap=2.0).sums)(hidden, HEAD, batch)
    logits = 2 * np.tanh(hidden.astype(float) @ HEAD.T / 2)
    losses = np.log(np.exp(logits).sum(-1)) - logits[..., 4]
    expected = (batch.loss_weights * losses).sum()
    np.testing.assert_allclose(sums.loss, expected, rtol=1e-5)


def test_the_plain_objective_is_the_mean_of_the_nats():
    batch = class_batch(None)
    hidden = hidden_for(batch)
    objective = TokenObjective()
    sums = jax.jit(objective.sums)(hidden, HEAD, batch)
    weights = batch.loss_weights
    assert weights.sum() == sums.weight == objective.divisor(batch) == 18
    np.testing.assert_allclose(sums.loss, np.sum(weights * nats(hidden)), rtol=1e-5)


@pytest.mark.parametrize(
    ("normalizer", "divisor"),
    [
        ("num_total_target_tokens", 27),
        ("average_per_sequence", 9),
        (5.0, 5),
        (0.25, 0.25),
        (None, 1),
    ],
)
def test_a_normalizer_changes_the_divisor_and_not_the_accuracy(normalizer, divisor):
    batch = class_batch(None)
    hidden = hidden_for(batch)
    objective = TokenObjective(normalizer=normalizer)
    sums = jax.jit(objective.sums)(hidden, HEAD, batch)
    plain = jax.jit(TokenObjective().sums)(hidden, HEAD, batch)
    np.testing.assert_allclose(objective.divisor(batch), divisor, rtol=1e-6)
    np.testing.assert_allclose(sums.accuracy, plain.accuracy)


def test_z_loss_and_smoothing_reach_the_loss():
    batch = class_batch(None)
    hidden = hidden_for(batch)
    smoothing = 0.1
    objective = TokenObjective(z_loss=0.01, label_smoothing=smoothing)
    sums = jax.jit(objective.sums)(hidden, HEAD, batch)
    logits = hidden.astype(float) @ HEAD.T
    normaliser = np.log(np.exp(logits).sum(-1))
    low = smoothing / (dummies.V - 1)
    wanted = np.where(np.arange(dummies.V) == 4, 1 - smoothing, low)
    losses = normaliser - logits @ wanted + np.sum(wanted * np.log(wanted))
    losses += 0.01 * normaliser**2
    np.testing.assert_allclose(
        sums.loss, (batch.loss_weights * losses).sum(), rtol=1e-5
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"z_loss": -1e-4}, "z_loss is -0.0001, expected at least 0"),
        ({"z_loss": float("nan")}, "z_loss is nan"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0, expected a number from 0"),
        ({"label_smoothing": -0.1}, "label_smoothing is -0.1"),
        ({"soft_cap": 0.0}, "soft_cap is 0.0, expected a number above 0"),
        ({"soft_cap": float("inf")}, "soft_cap is inf"),
        ({"normalizer": "mean"}, "'mean', expected one of num_real_target_tokens, num"),
        (
            {"normalizer": 0.0},
            "normalizer is 0.0, expected a number above 0",
        ),
        ({"normalizer": float("inf")}, "normalizer is inf"),
    ],
)
def test_a_token_objective_refuses(settings, message):
    with pytest.raises(InputError, match=message):
        TokenObjective(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"labels": "yes"}, "labels is 'yes', a str; expected a list"),
        ({"labels": ["yes"]}, "labels are .'yes'., expected two or more"),
        ({"labels": ["yes", "no", "yes"]}, "all different"),
        (
            {"loss": "perceptron"},
            "loss is 'perceptron', expected one of 'cross_entropy'",
        ),
        ({"hinge": -0.2}, "hinge is -0.2, expected at least 0"),
        ({"hinge": float("nan")}, "hinge is nan"),
    ],
)
def test_a_class_objective_refuses(settings, message):
    with refuses(message):
        ClassObjective(**({"labels": LABELS} | settings))


def test_objectives_of_the_same_settings_are_equal():
    assert ClassObjective(LABELS) == ClassObjective(tuple(LABELS))
    assert hash(ClassObjective(LABELS)) == hash(ClassObjective(tuple(LABELS)))
    assert ClassObjective(LABELS) != ClassObjective(LABELS, "hinge")
