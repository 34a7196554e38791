"""Calibration: how well the labels' probabilities match the share of right answers."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from prompt_tuning.evaluation.results import EvaluationResult

BINS = 10
"""Number of bins, with equal numbers of examples."""


class CalibrationPoint(NamedTuple):
    """A bin of examples with similar answer probabilities."""

    probability: float
    accuracy: float
    count: int


def calibration_points(
    probabilities: Float[np.ndarray, "n"], right: Bool[np.ndarray, "n"]
) -> list[CalibrationPoint]:
    """Groups examples by the probability of their answer, lowest first."""
    order = np.argsort(probabilities, kind="stable")
    parts = np.array_split(order, min(BINS, len(order)))
    return [
        CalibrationPoint(
            float(probabilities[part].mean()), float(right[part].mean()), len(part)
        )
        for part in parts
    ]


def calibration_error(points: list[CalibrationPoint]) -> float:
    """Returns the expected calibration error (Naeini et al. 2015), from 0 to 1.

    It is the mean distance between accuracy and probability, with bins of equal counts.
    """
    total = sum(point.count for point in points)
    gaps = (x.count * abs(x.accuracy - x.probability) for x in points)
    return sum(gaps) / total


def answers_and_labels(
    result: EvaluationResult,
) -> tuple[Float[np.ndarray, "n C"], Float[np.ndarray, "n C"]] | None:
    """Returns each example's answer and label, as rows with a single 1.

    Uses calibrated answers if available. None if no labels were ranked, or more than
    one may be right.
    """
    metrics, ranking = result.metrics, result.ranking
    if ranking is not None and ranking.problem != "single_label":
        return None
    sums = metrics.get("calibrated_macro_f1") or metrics.get("label_macro_f1")
    if sums is None:
        return None
    _, answered, labels = np.split(sums.rows, 3, axis=1)
    return answered, labels


def calibration_of(result: EvaluationResult) -> list[CalibrationPoint]:
    """Returns the points of a result; none if no labels were ranked."""
    classes = answers_and_labels(result)
    if classes is None or result.ranking is None:
        return []
    answered, labels = classes
    right = (answered * labels).sum(axis=1) > 0
    return calibration_points(result.ranking.probabilities.max(axis=1), right)
