"""The verdict and the checklist, on staged results."""

import numpy as np
import pytest
import scipy.stats

from prompt_tuning.evaluation.metric_sums import difference_interval, mean_metric
from prompt_tuning.report.calibration_curve import (
    calibration_error,
    calibration_of,
    calibration_points,
)
from prompt_tuning.report.charts import draw_calibration
from prompt_tuning.report.findings import check_run, confusion
from prompt_tuning.report.page import render_page
from prompt_tuning.report.verdict import judge
from tests.support.staged_reports import (
    log_of,
    measurement,
    recorded,
    reported,
    result,
)

COUNT = 500
FALLING = np.geomspace(5, 0.1, 100)


def shares(share: float) -> np.ndarray:
    """Examples of which a share is right."""
    return np.arange(COUNT) < share * COUNT


def suspicious(run, measured=None) -> set[str]:
    return {x.title for x in check_run(run, measured) if x.suspicious}


def test_paired_interval_is_scipy_s():
    random = np.random.default_rng(0)
    one = random.random(60)
    other = one + random.normal(0.1, 0.2, 60)
    found = difference_interval(
        mean_metric(one), mean_metric(other), resamples=20_000, seed=1
    )
    expected = scipy.stats.bootstrap(
        (one, other),
        lambda x, y, axis: x.mean(axis=axis) - y.mean(axis=axis),
        paired=True,
        method="percentile",
        n_resamples=20_000,
        rng=np.random.default_rng(2),
    ).confidence_interval
    np.testing.assert_allclose(found, expected, atol=0.003)
    unpaired = np.hypot(one.std(), other.std()) / np.sqrt(60)
    assert found[1] - found[0] < 3 * unpaired


def test_better_and_worse_have_opposite_numbers():
    high, low = result(shares(0.9), 0.1), result(shares(0.4), 2.0)
    better = judge(recorded(), measurement(high, low))
    assert better.outcome == "better"
    (first, *_) = better.differences
    assert (first.count, round(first.gain, 6)) == (COUNT, 0.5)
    assert better.sentence.startswith("Better than no prompt by 50.0 points (")
    assert "exact_match 90.0\N{NO-BREAK SPACE}% instead of 40.0" in better.sentence
    worse = judge(recorded(), measurement(low, high))
    assert worse.outcome == "worse"
    assert worse.sentence.partition("):")[0] == better.sentence.partition("):")[
        0
    ].replace("Better", "Worse")


def test_an_interval_with_zero_is_no_better():
    random = np.random.default_rng(0)
    one, other = random.random((2, COUNT)) < 0.5
    verdict = judge(recorded(), measurement(result(one), result(other)))
    assert verdict.outcome == "same"
    assert verdict.sentence.startswith("No better than no prompt: exact_match")


def test_the_metric_that_the_run_keeps_decides():
    run = recorded(keep_best="loss")
    verdict = judge(run, measurement(result(shares(1), 3.0), result(shares(0), 2.0)))
    assert (verdict.outcome, verdict.differences[0].metric) == ("worse", "loss")
    assert "Worse than no prompt by 1 nats (1 to 1, n = 500)" in verdict.sentence


STAGED = {
    "works": (log_of(FALLING), set()),
    "rate too high": (
        log_of(FALLING, prompt_norm=np.geomspace(3, 3000, 100)),
        {"Learning rate and the prompt's norm"},
    ),
    "rate too low": (
        log_of(np.full(100, 4.0), prompt_norm=np.full(100, 3.0)),
        {"Learning rate and the prompt's norm"},
    ),
    "too few steps": (log_of(np.linspace(4, 1, 100)), {"Still falling at the end"}),
    "no gradient": (
        log_of(np.full(100, 4.0), gradient_norm=np.zeros(100)),
        {"Gradient at the start"},
    ),
    "not learned": (
        log_of(np.full(100, 3.0), accuracy=np.full(100, 0.2)),
        {"Fits its training data"},
    ),
    "overfitting": (
        log_of(
            np.geomspace(4, 0.01, 100) ** 0.5,
            **{"evaluation/loss": np.abs(np.linspace(-2, 3, 100)) + 1},
        ),
        {"Training against held-out"},
    ),
}


@pytest.mark.parametrize("name", STAGED)
def test_a_staged_log_has_its_reason(name):
    log, expected = STAGED[name]
    found = suspicious(recorded(log))
    assert expected <= found
    if name == "works":
        assert found <= {"Still falling at the end"}


def test_confusion_counts_labels_by_answer():
    answers = np.array([0, 0, 0, 0, 1])
    right = np.array([True, True, False, False, True])
    measured = measurement(result(right, answers=answers), result(right))
    # Both of label 0 were answered right; of label 1, two were answered as 0.
    np.testing.assert_array_equal(confusion(measured, 0), [[2, 0], [2, 1]])
    assert confusion(measured, 1) is None


def test_calibration_compares_probability_with_accuracy():
    # Answers of probability 0.75 that are right as often; then surer than right.
    right = np.arange(40) % 4 > 0
    exact = calibration_points(np.full(40, 0.75), right)
    assert [point.count for point in exact] == [4] * 10
    assert calibration_error(exact) == 0
    sure = calibration_points(np.full(40, 1.0), right)
    assert round(calibration_error(sure), 6) == 0.25
    labelled = result(right, answers=np.zeros(40, int))
    measured = measurement(labelled, labelled)
    points = calibration_of(measured.tuned)
    # The answer costs one nat less than the other label.
    assert round(points[0].probability, 6) == round(1 / (1 + np.exp(-1)), 6)
    assert calibration_of(result(right)) == []
    assert "<h3>Calibration</h3>" in render_page([reported(recorded(), measured)])
    # The ninth system has the color of the first.
    assert draw_calibration(points, 8) == draw_calibration(points, 0)


def test_too_few_examples_are_named_as_the_reason():
    right = np.arange(20)
    measured = measurement(result(right[::-1] < 11), result(right < 9))
    html = render_page([reported(recorded(), measured)])
    assert "20 examples are too few to tell a gain of 10.0 points" in html


def test_swapped_labels_are_worse_than_chance():
    answers = np.arange(COUNT) % 2
    swapped = result(shares(0.1), answers=answers)
    measured = measurement(swapped, result(shares(0.5), answers=answers))
    assert "Labels" in suspicious(recorded(), measured)


def test_only_the_prior_of_the_classes_was_learned():
    always = result(shares(0.8), answers=np.zeros(COUNT, int))
    lines = [
        {
            "system": "tuned",
            "example": number,
            "input": "",
            "target": "yes" if right else "no",
            "output": "yes",
            "scores": {},
        }
        for number, right in enumerate(shares(0.8))
    ]
    measured = measurement(always, result(shares(0.5)), lines)
    assert {"Labels", "Variety of answers"} <= suspicious(recorded(), measured)


def test_a_loss_above_guessing_is_suspicious():
    few = result(np.ones(4, bool))
    found = suspicious(recorded(log_of(np.full(50, 9.0))), measurement(few, few))
    assert {"Loss at the start", "Number of examples"} <= found
