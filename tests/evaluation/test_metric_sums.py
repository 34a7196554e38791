"""Compares metrics, as sums over examples, with values computed by hand."""

import numpy as np
import pytest

from prompt_tuning.evaluation.metric_sums import (
    MetricSums,
    class_metrics,
    exponential_ratio,
    intervals,
    mean_metric,
    ratio,
)


def test_macro_f1_is_the_mean_f1_of_the_classes():
    # Class 0: two predictions, three labels, two correct: 2 * 2 / 5. Class 1: three
    # predictions, two labels, two correct: 4 / 5. Class 2 does not occur.
    answers, gold = np.array([0, 0, 1, 1, 1]), np.array([0, 0, 0, 1, 1])
    tallies = class_metrics(answers, gold, 3, "label")
    assert tallies["label_accuracy"].value == pytest.approx(4 / 5)
    assert tallies["label_macro_f1"].value == pytest.approx((4 / 5 + 4 / 5) / 2)


def test_a_class_that_is_never_predicted_has_f1_zero():
    answers, gold = np.zeros(4, int), np.array([0, 0, 0, 1])
    tallies = class_metrics(answers, gold, 2, "label")
    assert tallies["label_accuracy"].value == pytest.approx(3 / 4)
    assert tallies["label_macro_f1"].value == pytest.approx((6 / 7 + 0) / 2)


def test_a_mean_over_tokens_gives_long_examples_more_weight():
    nats = MetricSums(np.array([[2.0, 1.0], [3.0, 9.0]]), ratio)
    assert nats.value == 0.5
    np.testing.assert_allclose(nats.each(), [2, 1 / 3])
    perplexity = MetricSums(nats.rows, exponential_ratio)
    assert perplexity.value == pytest.approx(np.exp(0.5))


def test_an_interval_is_from_the_binomial_distribution():
    # 30 % of 400 examples are correct: the deviation is sqrt(0.3 * 0.7 / 400).
    right = np.arange(400) < 120
    bounds = intervals({"share": mean_metric(right)}, resamples=4000, seed=0)
    half = 1.96 * np.sqrt(0.3 * 0.7 / 400)
    np.testing.assert_allclose(bounds["share"], [0.3 - half, 0.3 + half], atol=0.004)


def test_systems_are_resampled_together_and_reproducibly():
    right = np.random.default_rng(0).random(50) < 0.5

    def drawn(values, seed):
        tallies = {"a": mean_metric(values), "other": mean_metric(values[:7])}
        return intervals(tallies, resamples=100, seed=seed)["a"]

    low, high = drawn(right, 3)
    wrong_low, wrong_high = drawn(~right, 3)
    np.testing.assert_allclose([low, high], [1 - wrong_high, 1 - wrong_low])
    assert drawn(right, 3) == (low, high) != drawn(right, 4)


def test_many_examples_are_sampled_in_parts(monkeypatch):
    tally = {"a": mean_metric(np.random.default_rng(0).random(64))}
    whole = intervals(tally, resamples=37, seed=0)
    monkeypatch.setattr("prompt_tuning.evaluation.metric_sums.DRAWN_AT_ONCE", 128)
    parts = intervals(tally, resamples=37, seed=0)
    # The same samples; their sums may be rounded differently.
    assert parts["a"] == pytest.approx(whole["a"], rel=1e-12)


def test_empty_categories_have_no_value_and_no_interval():
    nothing = MetricSums(np.zeros((3, 2)), ratio)
    assert np.isnan(nothing.value)
    empty = mean_metric(np.zeros(0))
    bounds = intervals({"none": nothing, "empty": empty}, resamples=5, seed=0)
    assert np.isnan(bounds["none"]).all() and np.isnan(bounds["empty"]).all()
