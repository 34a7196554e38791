"""Metrics as functions of sums over examples.

Each example adds a row of numbers to the sums, and a score function turns the sums into
the metric. One bootstrap thus serves shares, means over tokens, macro-F1 and BLEU.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float, Integer

LEVEL = 0.95
DRAWN_AT_ONCE = 2**22
"""Maximum number of counts drawn at a time (32 MB)."""

Sums = Float[np.ndarray, "*lead k"]
Score = Callable[[Sums], Float[np.ndarray, "*lead"]]


@dataclasses.dataclass(frozen=True)
class MetricSums:
    """One metric of some examples.

    Attributes:
      rows: numbers that each example adds to the sums, `[n, k]`.
      score: computes the metric from sums `[..., k]`; nan for sums over no examples.
      lower_is_better: whether smaller values are better.
      per_example: whether the metric is meaningful for a single example.
    """

    rows: Float[np.ndarray, "n k"]
    score: Score
    lower_is_better: bool = False
    per_example: bool = True

    @property
    def value(self) -> float:
        """The metric over all examples."""
        return float(self.score(self.rows.sum(axis=0)))

    def each(self) -> Float[np.ndarray, "n"]:
        """Computes the metric of each single example."""
        return self.score(self.rows)

    def select(self, chosen: Bool[np.ndarray, "n"]) -> "MetricSums":
        """Returns the same metric for the chosen examples."""
        return dataclasses.replace(self, rows=self.rows[chosen])


def ratio(sums: Sums) -> Float[np.ndarray, "*lead"]:
    """Divides the first sum by the second."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(sums[..., 0] / sums[..., 1])


def exponential_ratio(sums: Sums) -> Float[np.ndarray, "*lead"]:
    """Computes `exp` of the ratio, e.g. the perplexity from nats and weight."""
    with np.errstate(over="ignore"):
        return np.asarray(np.exp(ratio(sums)))


def macro_f1(sums: Sums) -> Float[np.ndarray, "*lead"]:
    """Averages the F1 over all classes that are expected or answered.

    The F1 of a class is `2 r / (a + g)`, with `r` right answers, `a` answers, and `g`
    examples of that class. The mean is 0 if there are no such classes.

    Args:
      sums: `[..., 3 C]`: `r` of each class, then `a` of each, then `g` of each.
    """
    right, answered, gold = np.split(sums, 3, axis=-1)  # each [..., C]
    total = answered + gold
    present = total > 0
    f1 = np.divide(2 * right, total, out=np.zeros_like(right), where=present)
    return np.asarray(f1.sum(axis=-1) / np.maximum(present.sum(axis=-1), 1))


def micro_f1(sums: Sums) -> Float[np.ndarray, "*lead"]:
    """Computes the F1 over the answers of all classes together; see `macro_f1`.

    It is 0 if no class is expected or answered.
    """
    right, answered, gold = (x.sum(-1) for x in np.split(sums, 3, axis=-1))
    return np.asarray(2 * right / np.maximum(answered + gold, 1))


def correlation(sums: Sums) -> Float[np.ndarray, "*lead"]:
    """Computes Pearson's correlation of `x` and `y`, averaged over `C` numbers.

    It is 0 if all `x` or all `y` are equal, so that training can go on.

    Args:
      sums: `[..., 6 C]`: `x`, `y`, `x**2`, `y**2`, `x y` and 1, each of all numbers.
    """
    x, y, xx, yy, xy, count = np.split(sums, 6, axis=-1)  # each [..., C]
    x, y = x / count, y / count
    variances = np.maximum(xx / count - x**2, 0), np.maximum(yy / count - y**2, 0)
    scale = np.sqrt(np.prod(variances, axis=0))
    covariance = xy / count - x * y
    found = np.divide(covariance, scale, out=np.zeros_like(scale), where=scale > 0)
    return np.asarray(found.mean(-1))


def mean_metric(values: Sequence[float] | Sequence[bool] | np.ndarray) -> MetricSums:
    """Averages one number per example."""
    numbers = np.asarray(values, np.float64)
    return MetricSums(np.stack([numbers, np.ones_like(numbers)], axis=1), ratio)


def class_metrics(
    answers: Integer[np.ndarray, "n"],
    gold: Integer[np.ndarray, "n"],
    classes: int,
    prefix: str,
) -> dict[str, MetricSums]:
    """Computes accuracy and macro-F1 of classified examples."""
    one_hot = np.eye(classes)
    right = one_hot[answers] * (answers == gold)[:, None]  # [n, C]
    rows = np.concatenate([right, one_hot[answers], one_hot[gold]], axis=1)  # [n, 3 C]
    return {
        f"{prefix}_accuracy": mean_metric(answers == gold),
        f"{prefix}_macro_f1": MetricSums(rows, macro_f1, per_example=False),
    }


def label_set_metrics(
    answers: Bool[np.ndarray, "n C"], gold: Bool[np.ndarray, "n C"], prefix: str
) -> dict[str, MetricSums]:
    """Computes metrics of examples that may have more than one label.

    The accuracy is the share of examples with exactly the right labels.
    """
    rows = np.concatenate([answers & gold, answers, gold], axis=1).astype(float)
    return {
        f"{prefix}_accuracy": mean_metric((answers == gold).all(axis=1)),
        f"{prefix}_micro_f1": MetricSums(rows, micro_f1, per_example=False),
        f"{prefix}_macro_f1": MetricSums(rows, macro_f1, per_example=False),
    }


def number_metrics(
    answers: Float[np.ndarray, "n C"], gold: Float[np.ndarray, "n C"]
) -> dict[str, MetricSums]:
    """Computes squared error and correlations of numbers.

    Spearman's correlation is Pearson's of the ranks among all examples; a bootstrap
    does not recompute the ranks.
    """
    from scipy.stats import rankdata

    errors = mean_metric(np.square(answers - gold).mean(axis=1))
    pairs = {
        "pearson": (answers, gold),
        "spearman": (rankdata(answers, axis=0), rankdata(gold, axis=0)),
    }
    metrics = {"mse": dataclasses.replace(errors, lower_is_better=True)}
    for name, (x, y) in pairs.items():
        x, y = x - x.mean(axis=0), y - y.mean(axis=0)
        columns = [x, y, x**2, y**2, x * y, np.ones_like(x)]
        rows = np.concatenate(columns, axis=1)
        metrics[name] = MetricSums(rows, correlation, per_example=False)
    return metrics


def intervals(
    metrics: Mapping[str, MetricSums], *, resamples: int, seed: int
) -> dict[str, tuple[float, float]]:
    """Estimates the 95 % confidence interval of each metric.

    Uses the percentile bootstrap (Efron and Tibshirani 1993, chapter 13). All metrics
    with the same number of examples share the draws, also across calls with the same
    seed.

    Returns:
      both ends of each interval; nan if the metric is undefined in every data set.
    """
    result = {}
    for count in {len(metric.rows) for metric in metrics.values()}:
        group = {n: each for n, each in metrics.items() if len(each.rows) == count}
        widths = [metric.rows.shape[1] for metric in group.values()]
        # Draw and sum the columns of all metrics together, [n, k].
        rows = np.concatenate([metric.rows for metric in group.values()], axis=1)
        all_sums = _resampled_sums(rows, resamples, seed)  # [r, k]
        sums = np.split(all_sums, np.cumsum(widths)[:-1], axis=1)
        for (name, metric), metric_sums in zip(group.items(), sums, strict=True):
            result[name] = _central_interval(metric.score(metric_sums))
    return result


def difference_interval(
    first: MetricSums, second: MetricSums, *, resamples: int, seed: int
) -> tuple[float, float]:
    """Estimates the 95 % interval of the first metric minus the second.

    Uses the paired percentile bootstrap: each drawn data set has the same examples for
    both metrics (Efron and Tibshirani 1993, chapters 8 and 13). The draws, and
    `resamples` and `seed`, mean the same as for `intervals`.
    """
    width = first.rows.shape[1]
    rows = np.concatenate([first.rows, second.rows], axis=1)
    sums = _resampled_sums(rows, resamples, seed)  # [r, k]
    return _central_interval(
        first.score(sums[:, :width]) - second.score(sums[:, width:])
    )


def _central_interval(values: Float[np.ndarray, "r"]) -> tuple[float, float]:
    values = values[~np.isnan(values)]
    if not len(values):
        return np.nan, np.nan
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _resampled_sums(
    rows: Float[np.ndarray, "n k"], resamples: int, seed: int
) -> Float[np.ndarray, "r k"]:
    """Sums rows over data sets drawn from them with replacement."""
    random, count = np.random.default_rng(seed), len(rows)
    if not count:
        return np.zeros((resamples, rows.shape[1]))
    at_once = max(1, DRAWN_AT_ONCE // count)
    parts = []
    for start in range(0, resamples, at_once):
        size = min(at_once, resamples - start)
        # How often each data set has each example, [size, n]
        counts = random.multinomial(count, np.full(count, 1 / count), size=size)
        parts.append(counts @ rows)
    return np.concatenate(parts)
