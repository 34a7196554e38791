"""Tell whether a run worked, in one sentence with numbers."""

import dataclasses
import shlex
from collections.abc import Mapping
from typing import Literal

from prompt_tuning.core.metric_directions import (
    AUTO,
    DIRECTIONS,
    ENTITY_F1,
    LABEL_ACCURACY,
    LOSS,
    metric_and_direction,
)
from prompt_tuning.evaluation.metric_sums import (
    MetricSums,
    difference_interval,
    intervals,
)
from prompt_tuning.report.measurement import Measurement
from prompt_tuning.report.recorded_run import RecordedRun
from prompt_tuning.settings.evaluation_settings import Evaluation

PREFERRED = (
    LABEL_ACCURACY,
    ENTITY_F1,
    "exact_match",
    "squad_f1",
    "rougeL",
    "bleu",
    "preference_accuracy",
    LOSS,
)
"""Metrics that decide, in order of preference, unless the run names one."""
UNBOUNDED = ("loss", "cross_entropy", "perplexity", "preference_loss")
NEGLIGIBLE = 0.001
"""Difference of a loss or margin, in nats, below which two systems count as equal."""
PER_HUNDRED = ("bleu",)
"""Metrics that already range from 0 to 100."""

Outcome = Literal["better", "same", "worse", "unknown"]


@dataclasses.dataclass(frozen=True)
class Difference:
    """A metric of the tuned model, compared with another system.

    `gain` is how much better the tuned model is, and `low` to `high` its 95 % interval.
    """

    metric: str
    other: str
    tuned: float
    base: float
    gain: float
    low: float
    high: float
    count: int

    @property
    def outcome(self) -> Outcome:
        """Whether the interval excludes that both are equally good.

        A negligible difference in nats counts as none.
        """
        if not is_share(self.metric) and abs(self.gain) < NEGLIGIBLE:
            return "same"
        if self.low > 0:
            return "better"
        return "worse" if self.high < 0 else "same"

    @property
    def sentence(self) -> str:
        """Describes the difference, with its interval."""
        values = f"{shown_value(self.metric, self.tuned)} instead of "
        values += shown_value(self.metric, self.base)
        interval = (
            f"{shown_gain(self.metric, self.low)} to "
            f"{shown_gain(self.metric, self.high)}, n = {self.count:,}"
        )
        name = self.metric
        if self.outcome == "same":
            return f"no better than {self.other}: {name} {values} ({interval})"
        gain = shown_gain(self.metric, abs(self.gain))
        if self.outcome == "worse":
            interval = (
                f"{shown_gain(self.metric, -self.high)} to "
                f"{shown_gain(self.metric, -self.low)}, n = {self.count:,}"
            )
        unit = unit_of(self.metric)
        return (
            f"{self.outcome} than {self.other} by {gain}{unit} ({interval}): "
            f"{name} {values}"
        )


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether a run worked.

    `differences` compare it with no prompt and with each text, by the deciding metric,
    and by the loss if another metric decides.
    """

    outcome: Outcome
    sentence: str
    differences: tuple[Difference, ...] = ()


def deciding_metric(
    metrics: Mapping[str, MetricSums], keep_best: object, evaluation: Evaluation
) -> str:
    """Returns the metric that decides whether a run worked."""
    if keep_best not in (None, AUTO):
        named = metric_and_direction(keep_best, evaluation.labels)
        if named is not None and named[0] in metrics:
            return named[0]
    return next((name for name in PREFERRED if name in metrics), next(iter(metrics)))


def compare(
    measured: Measurement, metric: str, other: str, category: str = ""
) -> Difference:
    """Compares the tuned model with another system on the same examples.

    `category` is empty for all examples.
    """
    first = measured.tuned.groups[category][metric]
    second = measured.results[other].groups[category][metric]
    evaluation = measured.evaluation
    low, high = difference_interval(
        first, second, resamples=evaluation.resamples, seed=evaluation.bootstrap_seed
    )
    gain = first.value - second.value
    if DIRECTIONS.get(metric, "max") == "min":
        gain, low, high = -gain, -high, -low
    return Difference(
        metric, other, first.value, second.value, gain, low, high, len(first.rows)
    )


def judge(recorded: RecordedRun, measured: Measurement | None) -> Verdict:
    """Judges a run by its measurement, or says why it cannot be judged."""
    if measured is None or measured.bare is None:
        return Verdict("unknown", _not_compared(recorded, measured))
    keep_best = recorded.setting("Run", "keep_best", AUTO)
    metric = deciding_metric(measured.tuned.metrics, keep_best, measured.evaluation)
    others = list(measured.results)[1:]
    differences = [compare(measured, metric, other) for other in others]
    first = differences[0]
    sentences = [difference.sentence for difference in differences]
    if metric != LOSS and LOSS in measured.tuned.metrics:
        in_loss = compare(measured, LOSS, others[0])
        differences.append(in_loss)
        if first.outcome == "same" and in_loss.outcome != "same":
            sentences.append(f"in loss, {in_loss.sentence}")
    text = "; ".join(sentences)
    return Verdict(first.outcome, f"{text[0].upper()}{text[1:]}.", tuple(differences))


def _not_compared(recorded: RecordedRun, measured: Measurement | None) -> str:
    """Says why a run is not compared, and what its log shows."""
    folder = recorded.directory
    if not recorded.has_evaluation and measured is None:
        return (
            "Not known: this run has no held-out data. Add it with prompt-tuning "
            f"report {folder} --eval FILE."
        )
    if measured is not None and measured.not_compared:
        return (
            f"Not known, because no prompt cannot be compared: {measured.not_compared}."
        )
    if measured is not None:
        return (
            "Not known: the run has neither prompts nor adapters to compare with, or a "
            "class head, which the frozen model lacks."
        )
    last = recorded.last_evaluation()
    known = ", ".join(f"{n} {shown_value(n, x)}" for n, x in last.items())
    begin = "Not compared with no prompt: this page is made from the log alone"
    ending = f"; its last evaluation has {known}" if known else ""
    if recorded.checkpoint is None:
        begin = "Not compared with no prompt: the run has no checkpoint"
        return f"{begin}{ending}."
    return (
        f"{begin}{ending}. To compare, and to see samples and the prompt, enter: "
        f"prompt-tuning report {shlex.quote(str(folder))}"
    )


def bounds_of(
    result: Mapping[str, MetricSums], evaluation: Evaluation
) -> dict[str, tuple[float, float]]:
    """Returns the 95 % interval of each metric, as `evaluate` prints it."""
    return intervals(
        result, resamples=evaluation.resamples, seed=evaluation.bootstrap_seed
    )


def shown_value(metric: str, value: float) -> str:
    """Formats the value of a metric: shares in percent."""
    if metric in UNBOUNDED or not is_share(metric):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return (
        f"{value:.1f}"
        if metric in PER_HUNDRED
        else f"{100 * value:.1f}\N{NO-BREAK SPACE}%"
    )


def shown_gain(metric: str, gain: float) -> str:
    """Formats a difference: shares in percentage points."""
    gain += 0.0  # no negative zero
    if not is_share(metric):
        return f"{gain:.3g}" if abs(gain) < 1000 else f"{gain:,.0f}"
    return f"{gain:.1f}" if metric in PER_HUNDRED else f"{100 * gain:.1f}"


def unit_of(metric: str) -> str:
    """Returns the unit of a gain, after a space; empty for a plain number."""
    if is_share(metric):
        return " points"
    return " nats" if metric in ("loss", "cross_entropy") else ""


def is_share(metric: str) -> bool:
    """Whether a metric lies between two fixed bounds."""
    return metric in DIRECTIONS and metric not in (*UNBOUNDED, "preference_margin")
