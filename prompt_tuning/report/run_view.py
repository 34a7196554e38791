"""A run, prepared for the page's template."""

import dataclasses
import functools
import hashlib
import platform
import shlex
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from prompt_tuning.core.version import __version__
from prompt_tuning.report.calibration_curve import (
    CalibrationPoint,
    calibration_error,
    calibration_of,
)
from prompt_tuning.report.findings import Finding, check_run, confusion
from prompt_tuning.report.measurement import Measurement
from prompt_tuning.report.recorded_run import RecordedRun
from prompt_tuning.report.samples import Samples, samples_of
from prompt_tuning.report.token_marks import MarkedTokens
from prompt_tuning.report.verdict import (
    Verdict,
    bounds_of,
    compare,
    deciding_metric,
    judge,
    shown_gain,
    unit_of,
)
from prompt_tuning.training.provenance import STEP


@dataclasses.dataclass(frozen=True)
class ReportedRun:
    """A run for a page."""

    name: str
    recorded: RecordedRun
    measured: Measurement | None

    @functools.cached_property
    def verdict(self) -> Verdict:
        """Whether the run worked; computed once, because bootstraps take time."""
        return judge(self.recorded, self.measured)


@dataclasses.dataclass(frozen=True)
class RunView:
    """One run, prepared for the template."""

    run: ReportedRun
    findings: Sequence[Finding]
    metric: str
    samples: Samples | None

    @classmethod
    def of(cls, run: ReportedRun, runs: int) -> "RunView":
        """Prepares one of several runs."""
        recorded, measured = run.recorded, run.measured
        metric, samples = "", None
        if measured is not None:
            keep_best = recorded.setting("Run", "keep_best")
            metrics = measured.tuned.metrics
            metric = deciding_metric(metrics, keep_best, measured.evaluation)
            samples = samples_of(measured, metric, runs)
        return cls(run, check_run(recorded, measured), metric, samples)

    @property
    def verdict(self) -> Verdict:
        """Whether the run worked."""
        return self.run.verdict

    @property
    def reasons(self) -> str:
        """A possible reason why it is no better, in one sentence."""
        if self.verdict.outcome not in ("same", "worse"):
            return ""
        found = [f"{x.title.lower()}: {x.advice}" for x in self.findings if x.advice]
        first = self.verdict.differences[0]
        if self.verdict.outcome == "same" and first.gain > 0:
            gain = f"{shown_gain(first.metric, first.gain)}{unit_of(first.metric)}"
            found.insert(
                0, f"{first.count:,} examples are too few to tell a gain of {gain}"
            )
        if not found:
            return "The checklist found no reason: the checks below have the numbers."
        return f"Why, perhaps: {'; '.join(found)}."

    @property
    def values(self) -> dict[str, float]:
        """Held-out metrics: measured, or else from the log."""
        measured = self.run.measured
        if measured is None:
            return self.run.recorded.best_evaluation()
        return {name: x.value for name, x in measured.tuned.metrics.items()}

    @property
    def tokens(self) -> dict[int, MarkedTokens]:
        """Tokens of the samples, by number."""
        shown = () if self.samples is None else self.samples.shown
        return {x.number: x.tokens for x in shown if x.tokens is not None}

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Each system's metrics with intervals, over all examples and by category."""
        measured = self.run.measured
        if measured is None:
            return []
        groups = []
        for part, metrics in measured.tuned.groups.items():
            systems = {n: x.groups[part] for n, x in measured.results.items()}
            bounds = {n: bounds_of(x, measured.evaluation) for n, x in systems.items()}
            rows = [
                {
                    "metric": metric,
                    "cells": [
                        (systems[name][metric].value, *bounds[name][metric])
                        for name in systems
                    ],
                    "gain": _gain(measured, metric, part),
                }
                for metric in metrics
            ]
            count = len(next(iter(metrics.values())).rows)
            groups.append({"name": part, "count": count, "rows": rows})
        return groups

    @property
    def matrices(self) -> list[tuple[str, Sequence[str], Any]]:
        """Name, labels and counts of each system's confusion matrix."""
        measured = self.run.measured
        ranking = None if measured is None else measured.tuned.ranking
        if measured is None or ranking is None or ranking.problem != "single_label":
            return []
        labels = ranking.labels
        return [
            (name, labels, confusion(measured, number))
            for number, name in enumerate(measured.results)
        ]

    @property
    def calibrations(self) -> list[tuple[str, Sequence[CalibrationPoint], float]]:
        """Name, points and error of each system's calibration."""
        measured = self.run.measured
        found = [
            (n, calibration_of(x))
            for n, x in (measured.results.items() if measured else ())
        ]
        return [(name, x, calibration_error(x)) for name, x in found if x]

    @property
    def marks(self) -> list[tuple[int, str]]:
        """The best step and the last one."""
        recorded = self.run.recorded
        done, planned = recorded.steps
        marks = []
        if recorded.best_step is not None:
            marks.append((recorded.best_step, f"best {recorded.best_step:,}"))
        if 0 < done < planned:
            marks.append((done, f"stopped {done:,} of {planned:,}"))
        return marks

    @property
    def cost(self) -> list[tuple[str, str]]:
        """Costs of the run, by name."""
        recorded, measured = self.run.recorded, self.run.measured
        done, planned = recorded.steps
        rows = [("steps", f"{done:,} of {planned:,}")]
        if recorded.checkpoint is not None:
            examples = recorded.checkpoint.get("extra", {}).get("examples")
            if isinstance(examples, int):
                rows.append(("training examples until the best step", f"{examples:,}"))
            files = recorded.checkpoint.get("files", {})
            sizes = {name: x["bytes"] for name, x in files.items()}
            for name, size in sizes.items():
                rows.append((f"bytes of {name}", f"{size:,}"))
        if measured is not None:
            size = measured.card.peft_bytes
            text = f"{size:,}" if isinstance(size, int) else f"none: {size}"
            rows.append(("bytes as PEFT stores it", text))
            rows.append(("parameters of the frozen model", f"{measured.parameters:,}"))
            for name, seconds in measured.seconds.items():
                rows.append((f"seconds to evaluate: {name}", f"{seconds:.1f}"))
        for metric, title in (
            ("tokens_per_second", "tokens per second, median"),
            ("padding_share", "share of padding, median"),
            ("data_wait_share", "share of time waiting for data, median"),
        ):
            values = recorded.curve(metric)[1]
            if values:
                middle = float(np.median(values))
                shown = f"{middle:,.0f}" if metric == "tokens_per_second" else None
                rows.append((title, shown or f"{100 * middle:.1f} %"))
        return rows

    @property
    def provenance(self) -> list[tuple[str, str]]:
        """Inputs of the run, by name."""
        recorded = self.run.recorded
        rows = [
            ("run directory", str(recorded.directory)),
            ("model", str(recorded.setting("Pretrained", "checkpoint", ""))),
            *((name.replace("_", " "), str(x)) for name, x in recorded.record.items()),
        ]
        for part in recorded.made_with:
            values = ", ".join(f"{k} {x}" for k, x in part.items() if k != STEP)
            rows.append((f"made with, from step {part.get(STEP)}", values))
        rows += [
            (f"{scope or 'data'}: {path}", checksum)
            for scope, files in recorded.data.items()
            for path, checksum in files.items()
        ]
        if recorded.checkpoint is not None:
            files = recorded.checkpoint.get("files", {})
            rows += [
                (f"checkpoint {recorded.best_step}: {name}", str(file["sha256"]))
                for name, file in files.items()
            ]
        config = recorded.config.encode(errors="surrogatepass")
        return [
            *rows,
            ("config", hashlib.sha256(config).hexdigest()),
            (
                "page written by",
                f"prompt_tuning {__version__}, jax {jax.__version__}, "
                f"numpy {np.__version__}, Python {platform.python_version()}",
            ),
        ]

    @property
    def commands(self) -> list[str]:
        """Commands that reproduce the run and its numbers."""
        folder = self.run.recorded.directory
        config = shlex.quote(f"{folder}/config.gin")
        lines = [f"prompt-tuning train --gin_file {config} --out NEW_DIRECTORY"]
        if self.run.recorded.has_evaluation:
            quoted = shlex.quote(str(folder))
            lines.append(f"prompt-tuning evaluate --run {quoted} --baseline")
        if self.run.recorded.made_with:
            lines.append(f"prompt-tuning verify {shlex.quote(str(folder))}")
        return lines


def _gain(measured: Measurement, metric: str, category: str) -> str | None:
    """Returns the gain over no prompt with its interval, if both were measured."""
    names = list(measured.results)
    if measured.bare is None or metric not in measured.bare.groups[category]:
        return None
    found = compare(measured, metric, names[1], category)
    if any(map(np.isnan, (found.gain, found.low, found.high))):
        return None
    low, high = shown_gain(metric, found.low), shown_gain(metric, found.high)
    return f"{shown_gain(metric, found.gain)}{unit_of(metric)} ({low} to {high})"
