"""A metric is what each example adds to some sums, and a number made of the sums.

So one way of drawing examples again serves them all: shares, means over tokens,
macro-F1 and BLEU alike.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float, Integer

LEVEL = 0.95
DRAWN_AT_ONCE = 2**22
"""Examples drawn before they are summed: 32 MB of their numbers."""

Sums = Float[np.ndarray, "*lead k"]
Score = Callable[[Sums], Float[np.ndarray, "*lead"]]


@dataclasses.dataclass(frozen=True)
class MetricSums:
    """One metric of some examples.

    Attributes:
      rows: what each example adds to the sums, `[n, k]`.
      score: the metric of sums `[..., k]`; nan where they are of nothing.
      lower_is_better: whether less of it is better.
      of_one: whether it means something for a single example.
    """

    rows: Float[np.ndarray, "n k"]
    score: Score
    lower_is_better: bool = False
    per_example: bool = True

    @property
    def value(self) -> float:
        """The metric."""
        return float(self.score(self.rows.sum(axis=0)))

    def each(self) -> Float[np.ndarray, "n"]:
        """The metric of each example alone."""
        return self.score(self.rows)

    def select(self, chosen: Bool[np.ndarray, "n"]) -> "MetricSums":
        """The same of the chosen examples."""
        return dataclasses.replace(self, rows=self.rows[chosen])


def ratio(sums: Sums) -> Float[np.ndarray, "*lead"]:
    """The first sum over the second."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(sums[..., 0] / sums[..., 1])


def exponential_ratio(sums: Sums) -> Float[np.ndarray, "*lead"]:
    """`exp` of the first sum over the second: perplexity of nats over tokens."""
    with np.errstate(over="ignore"):
        return np.asarray(np.exp(ratio(sums)))


def macro_f1(sums: Sums) -> Float[np.ndarray, "*lead"]:
    """The mean of the classes' F1, over those that were wanted or answered.

    The F1 of a class is `2 r / (a + w)`: `r` right answers, `a` answers, `w` wanted.

    Args:
      sums: `[..., 3 C]`, of each class `r`, then of each `a`, then of each `w`.
    """
    right, answered, wanted = np.split(sums, 3, axis=-1)
    either = answered + wanted
    present = either > 0
    each = np.divide(2 * right, either, out=np.zeros_like(right), where=present)
    with np.errstate(invalid="ignore"):
        return np.asarray(each.sum(axis=-1) / present.sum(axis=-1))


def mean_metric(values: Sequence[float] | Sequence[bool] | np.ndarray) -> MetricSums:
    """The mean of one number of each example."""
    found = np.asarray(values, np.float64)
    return MetricSums(np.stack([found, np.ones_like(found)], axis=1), ratio)


def class_metrics(
    answers: Integer[np.ndarray, "n"],
    gold: Integer[np.ndarray, "n"],
    classes: int,
    start: str,
) -> dict[str, MetricSums]:
    """Accuracy and macro-F1 of answers that are one of some classes.

    Args:
      answers: the class that was answered.
      gold: the right one.
      classes: how many there are, `C`.
      start: what the metrics' names begin with.
    """
    one = np.eye(classes)
    rows = np.concatenate(
        [one[answers] * (answers == gold)[:, None], one[answers], one[gold]], axis=1
    )
    return {
        f"{start}_accuracy": mean_metric(answers == gold),
        f"{start}_macro_f1": MetricSums(rows, macro_f1, per_example=False),
    }


def intervals(
    tallies: Mapping[str, MetricSums], *, resamples: int, seed: int
) -> dict[str, tuple[float, float]]:
    """Where each metric lies in 95 % of data sets drawn from its examples.

    The percentile bootstrap (Efron and Tibshirani 1993, chapter 13). Examples are drawn
    alike for all metrics of as many examples, here and in other calls with that seed.

    Args:
      tallies: of any numbers of examples.
      resamples: data sets that are drawn, each as large, with replacement.
      seed: of the draws.

    Returns:
      both ends of each interval; nan where no data set has the metric.
    """
    found = {}
    for count in {len(tally.rows) for tally in tallies.values()}:
        alike = {n: tally for n, tally in tallies.items() if len(tally.rows) == count}
        sizes = [tally.rows.shape[1] for tally in alike.values()]
        rows = np.concatenate([tally.rows for tally in alike.values()], axis=1)
        sums = np.split(
            _drawn_sums(rows, resamples, seed), np.cumsum(sizes)[:-1], axis=1
        )
        for (name, tally), own in zip(alike.items(), sums, strict=True):
            found[name] = _middle(tally.score(own))
    return found


def _middle(values: Float[np.ndarray, "r"]) -> tuple[float, float]:
    """Between what 95 % of the values lie, those aside that are not there."""
    values = values[~np.isnan(values)]
    if not len(values):
        return np.nan, np.nan
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _drawn_sums(
    rows: Float[np.ndarray, "n k"], resamples: int, seed: int
) -> Float[np.ndarray, "r k"]:
    """The sums of data sets drawn from the rows with replacement."""
    random, count = np.random.default_rng(seed), len(rows)
    if not count:
        return np.zeros((resamples, rows.shape[1]))
    at_once = max(1, DRAWN_AT_ONCE // count)
    parts = []
    for start in range(0, resamples, at_once):
        size = min(at_once, resamples - start)
        drawn = random.multinomial(count, np.full(count, 1 / count), size=size)
        parts.append(drawn @ rows)
    return np.concatenate(parts)
