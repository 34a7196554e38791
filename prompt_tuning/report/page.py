"""Render the page: a single file with its style, its script and all its numbers."""

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from prompt_tuning.core.errors import InputError
from prompt_tuning.report import charts
from prompt_tuning.report.curves import Panel, panels_of
from prompt_tuning.report.recorded_run import RecordedRun
from prompt_tuning.report.run_view import ReportedRun, RunView
from prompt_tuning.report.varied_settings import ComparedSettings, varied_settings
from prompt_tuning.report.verdict import PREFERRED, shown_value
from prompt_tuning.report.visible_text import visible

FOLDER = Path(__file__).parent
ROWS = 12
"""Rows of the table next to a curve."""


def render_page(runs: Sequence[ReportedRun]) -> str:
    """Renders the page of runs; the same input gives the same bytes.

    Raises:
      InputError: without a run.
    """
    if not runs:
        raise InputError("there is no run to report")
    views = [RunView.of(run, len(runs)) for run in runs]
    recorded = [run.recorded for run in runs]
    panels = panels_of(recorded)
    marks = views[0].marks if len(views) == 1 else []
    script = (FOLDER / "page.js").read_text("utf-8")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        finalize=_finalize,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": _number, "value": shown_value}
    return environment.get_template("page.html.jinja").render(
        views=views,
        metrics=list(dict.fromkeys(name for view in views for name in view.values)),
        warnings=differences_of_data([(x.name, x.recorded) for x in runs]),
        panels=[_panel(panel, runs, marks) for panel in panels],
        tokens=[view.tokens for view in views],
        varied=_compare_settings(views),
        draw_calibration=charts.draw_calibration,
        draw_parallel=charts.draw_parallel,
        parallel=charts.PARALLEL,
        square=charts.SQUARE,
        draw_matrix=charts.draw_matrix,
        draw_shares=charts.draw_shares,
        shares_size=charts.SHARES,
        size=(charts.WIDTH, charts.HEIGHT, charts.LEFT, charts.RIGHT),
        cells=charts.CELLS,
        style=Markup((FOLDER / "page.css").read_text("utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _compare_settings(views: Sequence[RunView]) -> ComparedSettings | None:
    """Returns settings that differ between runs, with a metric to compare them by."""
    settings = varied_settings([view.run.recorded for view in views])
    names = dict.fromkeys((*PREFERRED, *(n for view in views for n in view.values)))
    by_metric = {n: [view.values.get(n, math.nan) for view in views] for n in names}
    by_metric = {n: x for n, x in by_metric.items() if any(map(math.isfinite, x))}
    if len(views) < 2 or not settings or not by_metric:
        return None
    differing = [name for name, x in by_metric.items() if len(set(x)) > 1]
    metric = next(iter(differing or by_metric))
    return ComparedSettings(settings, metric, by_metric[metric])


def _finalize(value: Any) -> Any:
    """Makes hidden characters visible in all text that is not the page's own markup."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return visible(value)
    return value


def _panel(
    panel: Panel, runs: Sequence[ReportedRun], marks: Sequence[tuple[int, str]]
) -> Mapping[str, Any]:
    """Prepares a panel: its picture, the data for its cursor, and its table."""
    several = len(runs) > 1
    names = []
    for series in panel.series:
        name = runs[series.run].name
        names.append(visible(f"{name}, {series.kind}" if several else series.kind))
    return {
        "metric": panel.metric,
        "logarithmic": panel.logarithmic,
        "picture": charts.draw_panel(panel, marks),
        "data": {
            "last": max(s.steps[-1] for s in panel.series),
            "series": [
                {"name": name, "run": s.run, "steps": s.steps, "values": s.values}
                for name, s in zip(names, panel.series, strict=True)
            ],
        },
        "series": list(zip(names, panel.series, strict=True)),
        "table": [_rows(s.steps, s.values) for s in panel.series],
    }


def _rows(steps: Sequence[int], values: Sequence[float]) -> list[tuple[int, float]]:
    """Returns evenly spaced points, including the minimum and the maximum."""
    last = len(steps) - 1
    chosen = {round(i * last / (ROWS - 1)) for i in range(ROWS)}
    chosen |= {int(np.argmin(values)), int(np.argmax(values))}
    return [(steps[i], values[i]) for i in sorted(chosen)]


def _number(value: float) -> str:
    """Formats a number with four decimals, as `evaluate` prints it."""
    if np.isnan(value):
        return "-"
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.0f}"


def differences_of_data(runs: Sequence[tuple[str, RecordedRun]]) -> list[str]:
    """Returns a warning for each kind of data that differs between runs.

    Files are the same if their contents are, whatever their names.
    """
    warnings = []
    for scope, what, effect in (
        ("evaluation", "measured on different held-out data", "cannot be compared"),
        ("train", "trained on different data", "may differ for that reason"),
    ):
        groups: dict[tuple[str, ...], list[str]] = {}
        for name, run in runs:
            if run.data.get(scope):
                # A file without a checksum is known by its name alone.
                files = run.data[scope].items()
                key = tuple(sorted(x if len(x) == 64 else path for path, x in files))
                groups.setdefault(key, []).append(name)
        if len(groups) > 1:
            parts = " / ".join(", ".join(names) for names in groups.values())
            warnings.append(
                f"These runs were {what}, so their numbers {effect}: {parts}."
            )
    return warnings
