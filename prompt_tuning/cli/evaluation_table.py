"""Tables of the results of `prompt-tuning evaluate`."""

import math
from collections.abc import Mapping, Sequence

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from prompt_tuning.evaluation.metric_sums import MetricSums, intervals
from prompt_tuning.evaluation.results import EvaluationResult
from prompt_tuning.settings.evaluation_settings import Evaluation
from prompt_tuning.tuned.ensembles import EnsembleResult


def comparison_table(
    results: Mapping[str, EvaluationResult], evaluation: Evaluation
) -> Table:
    """Tabulates each metric of each system, over all examples and by category."""
    table = Table("metric")
    alone = len(results) == 1
    for name in results:
        # A text prompt may be long, and may contain rich's markup.
        title = "value" if alone else escape(name)
        table.add_column(title, justify="right", overflow="fold", max_width=40)
    if alone:
        table.add_column("95 %", justify="right")
    for part in next(iter(results.values())).groups:
        systems = {name: result.groups[part] for name, result in results.items()}
        if part:
            table.add_section()
            count = len(next(iter(systems.values()))["loss"].rows)
            table.add_row(Text(f"{part} ({count:,})", style="bold"))
        _add_metrics(table, systems, evaluation)
    return table


def _add_metrics(
    table: Table,
    systems: Mapping[str, Mapping[str, MetricSums]],
    evaluation: Evaluation,
) -> None:
    """Adds a row per metric, with each system's value and interval."""
    bounds = {
        name: intervals(
            metrics, resamples=evaluation.resamples, seed=evaluation.bootstrap_seed
        )
        for name, metrics in systems.items()
    }
    for metric in next(iter(systems.values())):
        sums = {name: metrics[metric] for name, metrics in systems.items()}
        best = _best_systems(sums)
        cells = []
        for name in sums:
            style = "bold green" if name in best else ""
            value = Text(_format(sums[name].value), style=style)
            interval = Text("–".join(map(_format, bounds[name][metric])), style="dim")
            if len(sums) == 1:
                cells += [value, interval]
            else:
                cells.append(Text.assemble(value, " ", interval))
        table.add_row(Text(metric), *cells)


def _best_systems(sums: Mapping[str, MetricSums]) -> list[str]:
    """Returns the systems with the best value; none if all values are equal."""
    values = {name: metric.value for name, metric in sums.items()}
    numbers = {name: value for name, value in values.items() if not math.isnan(value)}
    if len(set(numbers.values())) < 2:
        return []
    lower = next(iter(sums.values())).lower_is_better
    best = min(numbers.values()) if lower else max(numbers.values())
    return [name for name, value in numbers.items() if value == best]


def _format(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.0f}"


def vote_table(
    results: Mapping[str, EnsembleResult], prompts: Sequence[str], vote: str
) -> Table:
    """Tabulates each metric of the prompts together and alone."""
    table = Table("metric", f"together ({vote})", *map(escape, prompts))
    for metric, result in results.items():
        values = (result.together, *result.alone)
        table.add_row(metric, *(f"{value:.4f}" for value in values))
    return table
