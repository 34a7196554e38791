"""The curves of runs, grouped into panels, and thinned without losing peaks."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from prompt_tuning.core import learning_rates
from prompt_tuning.core.errors import InputError
from prompt_tuning.report.recorded_run import Curve, RecordedRun
from prompt_tuning.training.metrics_log import EVALUATION

POINTS = 9600
"""Maximum number of points of all curves on a page, about 0.5 MB."""
MOST_BINS, FEWEST_BINS = 400, 12
TRAINING, HELD_OUT = "training", "held out"
FIRST = ("loss", "label_accuracy", "exact_match", "accuracy")
LAST = (
    *("gradient_norm", "prompt_norm", "learning_rate"),
    *("tokens_per_second", "padding_share", "data_wait_share"),
)
LOG_RATIO = 50.0
"""Ratio of values above which an axis is logarithmic."""
SCHEDULES = (
    "warmup_constant",
    "warmup_linear_decay",
    "warmup_cosine_decay",
    "warmup_rsqrt_decay",
)


class Series(NamedTuple):
    """One curve.

    Its kind is `TRAINING` or `HELD_OUT`. `count` is the number of points in the log, of
    which `steps` are drawn.
    """

    run: int
    kind: str
    steps: Sequence[int]
    values: Sequence[float]
    count: int


@dataclasses.dataclass(frozen=True)
class Panel:
    """Curves of one metric on one axis."""

    metric: str
    series: Sequence[Series]

    @property
    def logarithmic(self) -> bool:
        """Whether the values span so much that the axis is logarithmic."""
        values = [value for series in self.series for value in series.values]
        return min(values) > 0 and max(values) > LOG_RATIO * min(values)


def thinned(curve: Curve, bins: int) -> Curve:
    """Keeps the minimum and maximum of each of several equal bins.

    The first and the last point are kept, too. No peak is lost, and every value is one
    of the curve's.
    """
    steps, values = curve
    if len(steps) <= 2 * bins:
        return curve
    edges = np.linspace(0, len(steps), bins + 1).astype(int)
    kept = {0, len(steps) - 1}
    for start, stop in itertools.pairwise(edges):
        part = np.asarray(values[start:stop])
        kept |= {int(start + part.argmin()), int(start + part.argmax())}
    order = sorted(kept)
    return [steps[i] for i in order], [values[i] for i in order]


def panels_of(runs: Sequence[RecordedRun]) -> list[Panel]:
    """Groups all curves of runs by metric, the most important metrics first."""
    curves: dict[str, list[tuple[int, str, Curve]]] = {}
    for number, run in enumerate(runs):
        for name, curve in _curves_of(run).items():
            if curve[0]:
                kind = HELD_OUT if name.startswith(EVALUATION) else TRAINING
                metric = name.removeprefix(EVALUATION)
                curves.setdefault(metric, []).append((number, kind, curve))
    count = sum(map(len, curves.values()))
    bins = max(FEWEST_BINS, min(MOST_BINS, POINTS // (2 * max(count, 1))))
    return [
        Panel(
            metric,
            [
                Series(number, kind, *thinned(curve, bins), len(curve[0]))
                for number, kind, curve in curves[metric]
            ],
        )
        for metric in sorted(curves, key=_rank)
    ]


def _curves_of(run: RecordedRun) -> Mapping[str, Curve]:
    curves = {name: run.curve(name) for name in run.metrics}
    curves["learning_rate"] = learning_rate_curve(run.values, run.curve("loss")[0])
    return curves


def learning_rate_curve(
    values: Mapping[str, Mapping[str, Any]], steps: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Returns the steps and their learning rates.

    A step logged as `n` has taken the rate at `n - 1`, because schedules count from 0.
    Both lists are empty if the config has no rate, more than one, or a user-defined
    one.
    """
    schedules = [name for name in SCHEDULES if name in values]
    numbers = {
        float(x["learning_rate"])
        for x in values.values()
        if isinstance(x.get("learning_rate"), int | float)
    }
    if len(schedules) + len(numbers) != 1:
        return [], []
    if numbers:
        return [*steps], [*numbers] * len(steps)
    try:
        schedule = getattr(learning_rates, schedules[0])(**values[schedules[0]])
    except (InputError, TypeError):
        return [], []
    rates = np.asarray(schedule(np.asarray(steps) - 1), np.float64)
    return [*steps], [float(x) for x in np.broadcast_to(rates, len(steps))]


def _rank(metric: str) -> tuple[int, str]:
    """Sorts well-known metrics first, and costs and diagnostics last."""
    if metric in FIRST:
        return FIRST.index(metric), ""
    if metric in LAST:
        return 2 * len(FIRST) + LAST.index(metric), ""
    return len(FIRST), metric
