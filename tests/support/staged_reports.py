"""Runs for a page with staged results: made of arrays, without a model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prompt_tuning.evaluation.metric_sums import (
    MetricSums,
    class_metrics,
    mean_metric,
    ratio,
)
from prompt_tuning.evaluation.results import EvaluationResult, Ranking
from prompt_tuning.report.measurement import (
    MeasuredVectors,
    Measurement,
    PromptCard,
)
from prompt_tuning.report.prompt_effects import PromptEffects
from prompt_tuning.report.recorded_run import RecordedRun
from prompt_tuning.report.run_view import ReportedRun
from prompt_tuning.settings.data_source import DataSource
from prompt_tuning.settings.evaluation_settings import Evaluation
from prompt_tuning.tuned.comparison import NO_PROMPT

LABELS = ("yes", "no")
Numbers = Sequence[float] | np.ndarray


def loss_metric(losses: Numbers) -> MetricSums:
    """The loss of examples that have one token each."""
    rows = np.stack([np.asarray(losses, float), np.ones(len(losses))], axis=1)
    return MetricSums(rows, ratio, lower_is_better=True)


def result(
    right: np.ndarray, loss: float = 1.0, answers: np.ndarray | None = None
) -> EvaluationResult:
    """A result whose exact match is given; of labels, if answers are given."""
    metrics = {"loss": loss_metric(np.full(len(right), loss))}
    if answers is None:
        return EvaluationResult(metrics | {"exact_match": mean_metric(right)}, {})
    gold = np.where(right, answers, 1 - answers)
    nats = np.where(np.eye(2, dtype=bool)[answers], 0.0, 1.0)
    metrics |= class_metrics(answers, gold, 2, "label")
    return EvaluationResult(metrics, {}, Ranking(LABELS, nats))


def measurement(
    tuned: EvaluationResult,
    bare: EvaluationResult,
    predictions: Sequence[Mapping[str, Any]] = (),
    token: str = "'a'",
    effects: PromptEffects | str = "not measured",
) -> Measurement:
    """A measurement of two systems."""
    vectors = MeasuredVectors(np.ones(2), [[(token, 0.5)]] * 2, np.eye(2))
    card = PromptCard(
        {"decoder/prompt/prompt": ((2, 4), 1.0)},
        {"decoder/prompt": vectors},
        "",
        (0.5, 1.0, 2.0),
        1000,
        effects,
    )
    return Measurement(
        {"tuned": tuned, NO_PROMPT: bare},
        {"tuned": 1.0, NO_PROMPT: 1.0},
        predictions,
        "",
        "some examples",
        [],
        Evaluation(data=DataSource(files="held_out.jsonl"), exact_match=True),
        61,
        1000,
        card,
        "restored",
    )


def recorded(
    log: Sequence[Mapping[str, float]] = (),
    directory: str = "run",
    config: str = "",
    data: Mapping[str, Mapping[str, str]] | None = None,
    steps: int = 100,
    keep_best: str = "auto",
) -> RecordedRun:
    """A record of a run with a log."""
    settings = {"steps": steps, "evaluation": "@Evaluation()", "keep_best": keep_best}
    values = {"Run": settings}
    checkpoint = {"step": steps, "files": {}}
    return RecordedRun(
        Path(directory), config, values, log, [], {}, checkpoint, data or {}
    )


def log_of(losses: Numbers, **others: Numbers) -> list[dict]:
    """A log with a line for each loss, and other metrics of as many values."""
    series = {"loss": losses, **others}
    return [
        {"step": number + 1, **{name: float(x[number]) for name, x in series.items()}}
        for number in range(len(losses))
    ]


def reported(run: RecordedRun, measured: Measurement | None = None) -> ReportedRun:
    """A run for a page."""
    return ReportedRun(str(run.directory), run, measured)
