"""Summarize a sweep from its members' logs and checkpoints, and store it as JSON."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from prompt_tuning.checkpoints.run_store import checkpoint_files, checkpoint_names
from prompt_tuning.checkpoints.run_store.checkpoint_selection import KeepBest, best_step
from prompt_tuning.core.atomic_files import replace_file
from prompt_tuning.training.metrics_log import EVALUATION, METRICS_FILE, read_log
from prompt_tuning.training.sweep.best_member import BEST_FILE
from prompt_tuning.training.sweep.sweep_run import (
    SWEEP_FILE,
    Sweep,
    SweepMember,
    read_diverged,
)

TRAINING_LOSS: KeepBest = ("train loss", "min")


@dataclasses.dataclass(frozen=True)
class MemberResult:
    """The results of one member.

    Attributes:
      name: name of the member and its directory.
      varies: settings that differ among members.
      log: lines of its log, as mappings.
      diverged: reason why it was dropped, or None.
      best_step: step of the checkpoint that evaluation and generation use, if a metric
        selected it; else None.
      best_value: value by which members are compared: the metric at that step or,
        without an evaluation, the mean training loss over the last tenth of the log;
        None if there is neither.
    """

    name: str
    varies: Mapping[str, str]
    log: Sequence[Mapping[str, int | float]]
    diverged: str | None
    best_step: int | None
    best_value: float | None

    def curve(self, metric: str) -> list[tuple[int, float]]:
        """Steps and values of a metric in the log."""
        return [
            (int(line["step"]), line[metric]) for line in self.log if metric in line
        ]

    def last(self, metric: str) -> float | None:
        """The latest value of a metric; None if the log has none."""
        curve = self.curve(metric)
        return curve[-1][1] if curve else None


@dataclasses.dataclass(frozen=True)
class SweepSummary:
    """The results of a sweep.

    Attributes:
      results: results of the members, in their order.
      by: metric by which members are compared, and "min" or "max".
      best: name of the best member; None if no member has the metric.
    """

    results: Sequence[MemberResult]
    by: KeepBest
    best: str | None

    @property
    def evaluated(self) -> list[str]:
        """Names of the held-out metrics, as in the log."""
        lines = (line for result in self.results for line in result.log)
        names = (name for line in lines for name in line)
        return list(dict.fromkeys(n for n in names if n.startswith(EVALUATION)))


def summarize(sweep: Sweep) -> SweepSummary:
    """Reads the members' results from their directories."""
    run = sweep.run
    by = TRAINING_LOSS
    if run.evaluation is not None and run.best_by is not None:
        by = run.best_by
    results = [_read_result(member, by) for member in sweep.members]
    sign = 1 if by[1] == "min" else -1
    ranked = [
        (sign * result.best_value, index)
        for index, result in enumerate(results)
        if result.best_value is not None
    ]
    return SweepSummary(results, by, results[min(ranked)[1]].name if ranked else None)


def _read_result(member: SweepMember, by: KeepBest) -> MemberResult:
    file = member.directory / METRICS_FILE
    log = read_log(file) if file.exists() else []
    record = read_diverged(member.directory)
    diverged = None if record is None else record[1]
    step, value = None, None
    if by == TRAINING_LOSS:
        losses = [line["loss"] for line in log if "loss" in line]
        tail = losses[-max(1, len(losses) // 10) :]
        if tail and diverged is None:
            value = sum(tail) / len(tail)
    else:
        folder = member.directory / checkpoint_names.FOLDER
        step = best_step(folder, by, lambda _: None)
        if step is not None:
            state = checkpoint_files.read_state(folder / f"checkpoint_{step}")
            value = float(state["metrics"][by[0]])
    return MemberResult(member.name, member.varies, log, diverged, step, value)


def write_summary(directory: Path, summary: SweepSummary) -> None:
    """Writes `sweep.json`, and `best.json` with the best member's directory."""
    evaluated = [name.removeprefix(EVALUATION) for name in summary.evaluated]
    members: dict[str, Any] = {
        result.name: {
            "varies": dict(result.varies),
            "steps": max((int(line["step"]) for line in result.log), default=0),
            "diverged": result.diverged,
            "training_loss": result.last("loss"),
            "evaluation": {n: result.last(EVALUATION + n) for n in evaluated},
            "best": {"step": result.best_step, "value": result.best_value},
        }
        for result in summary.results
    }
    content = {"by": list(summary.by), "best": summary.best, "members": members}
    replace_file(directory / SWEEP_FILE, json.dumps(content, indent=1) + "\n")
    if summary.best is not None:
        best = {"directory": summary.best, **members[summary.best]["best"]}
        replace_file(directory / BEST_FILE, json.dumps(best, indent=1) + "\n")
    else:
        (directory / BEST_FILE).unlink(missing_ok=True)


def summary_table(summary: SweepSummary) -> Table:
    """Returns a table of the members' settings and results; the best one is marked."""
    varied, metric = list(summary.results[0].varies), summary.by[0]
    table = Table(
        title=f"{len(summary.results)} members, at the end and at their best",
        caption="* best" + ", x diverged" * any(r.diverged for r in summary.results),
    )
    table.add_column("", no_wrap=True)
    for name in varied:
        table.add_column(name, overflow="fold", min_width=min(len(name), 16))
    table.add_column("train\nloss", justify="right", no_wrap=True)
    for name in summary.evaluated:
        shown = name.removeprefix(EVALUATION).replace("_", "\n")
        table.add_column(shown, justify="right", no_wrap=True)
    table.add_column(f"best\n{metric}", justify="right")
    for result in summary.results:
        best = result.name == summary.best
        at = "" if result.best_step is None else f" @{result.best_step}"
        table.add_row(
            "*" * best + "x" * bool(result.diverged),
            *(escape(result.varies[name]) for name in varied),
            _shown(result.last("loss")),
            *(_shown(result.last(name)) for name in summary.evaluated),
            _shown(result.best_value) + at,
            style="bold" if best else None,
        )
    return table


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
