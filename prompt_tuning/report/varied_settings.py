"""Settings that differ between a page's runs, and how their metric depends on them."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from prompt_tuning.core.metric_directions import DIRECTIONS
from prompt_tuning.report.recorded_run import RecordedRun

IGNORED = {("Run", "directory")}
MACRO = "macro"
"""Factory of gin's macros; parameters have their values, too."""
MOST = 8
"""Maximum number of settings shown."""
LOG_RATIO = 20.0
"""Ratio of a setting's values above which its axis is logarithmic."""
LARGEST_VALUE = 24
"""Maximum number of characters shown of a value."""


class Axis(NamedTuple):
    """One of the parallel axes.

    `places` has the position of each run's value, from 0 to 1; nan without one.
    """

    name: str
    places: Float[np.ndarray, "runs"]
    ticks: Sequence[tuple[float, str]]


@dataclasses.dataclass(frozen=True)
class ComparedSettings:
    """Settings that differ between runs, and the metric to compare the runs by."""

    settings: Mapping[str, Sequence[Any]]
    metric: str
    values: Sequence[float]

    @property
    def axes(self) -> Sequence["Axis"]:
        """Parallel axes of the settings and the metric."""
        return parallel_axes(self.settings, self.metric, self.values)

    @property
    def map(self) -> "HeatMap | None":
        """The heat map of two settings; None for fewer."""
        return heat_map(self.settings, self.metric, self.values)


class HeatMap(NamedTuple):
    """The best metric among the runs with each pair of values of two settings.

    `shades` run from 0 for the worst value to 1 for the best; they and `values` are nan
    without a run.
    """

    rows: tuple[str, Sequence[str]]
    columns: tuple[str, Sequence[str]]
    values: Float[np.ndarray, "r c"]
    shades: Float[np.ndarray, "r c"]


def varied_settings(runs: Sequence[RecordedRun]) -> dict[str, list[Any]]:
    """Returns the settings that differ between runs, with the value of each run.

    Settings that always change together, e.g. parameters set by one macro, are named
    once. If there are more than `MOST`, only the first ones are returned.
    """
    names = dict.fromkeys(
        (factory, name)
        for run in runs
        for factory, settings in run.values.items()
        if factory != MACRO
        for name in settings
    )
    found: dict[str, list[Any]] = {}
    seen = set()
    for factory, name in names:
        values = [run.setting(factory, name) for run in runs]
        shown = tuple(map(repr, values))
        alike = tuple(map(shown.index, shown))  # the first run with the same value
        if (factory, name) in IGNORED or len(set(shown)) == 1 or alike in seen:
            continue
        seen.add(alike)
        found[f"{factory}.{name}"] = values
    return dict(itertools.islice(found.items(), MOST))


def parallel_axes(
    settings: Mapping[str, Sequence[Any]], metric: str, values: Sequence[float]
) -> list[Axis]:
    """Returns an axis per setting, and a last one for the metric."""
    axes = [_axis(name, each) for name, each in settings.items()]
    measured = sorted({x for x in values if math.isfinite(x)})
    return [*axes, _numeric(metric, values, [measured[0], measured[-1]])]


def _axis(name: str, values: Sequence[Any]) -> Axis:
    numbers = [x for x in values if isinstance(x, int | float)]
    if len(numbers) == len(values) and not any(isinstance(x, bool) for x in values):
        numbers = [*map(float, numbers)]
        return _numeric(name, numbers, sorted(set(numbers)))
    distinct = list(dict.fromkeys(map(repr, values)))
    last = max(len(distinct) - 1, 1)
    places = np.array([distinct.index(repr(x)) / last for x in values])
    ticks = [(i / last, shown_value(text)) for i, text in enumerate(distinct)]
    return Axis(name, places, ticks)


def _numeric(name: str, values: Sequence[float], ticks: Sequence[float]) -> Axis:
    low, high = ticks[0], ticks[-1]
    scale = math.log if low > 0 and high > LOG_RATIO * low else float
    span = (scale(high) - scale(low)) or 1.0

    def place(value: float) -> float:
        return (scale(value) - scale(low)) / span if math.isfinite(value) else math.nan

    shown = ticks if len(ticks) <= 8 else [low, high]
    return Axis(
        name, np.array([*map(place, values)]), [(place(x), f"{x:.4g}") for x in shown]
    )


def shown_value(text: str) -> str:
    """Shortens the text of a value."""
    short = len(text) <= LARGEST_VALUE
    return text if short else f"{text[: LARGEST_VALUE - 3]}..."


def heat_map(
    settings: Mapping[str, Sequence[Any]], metric: str, values: Sequence[float]
) -> HeatMap | None:
    """Returns the map of the two settings with the most values; None for fewer.

    Takes the same arguments as `parallel_axes`.
    """
    counts = {name: len(set(map(repr, each))) for name, each in settings.items()}
    # Seeds last: the best of them counts.
    names = sorted(counts, key=lambda name: (name.endswith("seed"), -counts[name]))[:2]
    if len(names) < 2:
        return None
    sign = -1 if DIRECTIONS.get(metric, "max") == "min" else 1
    labels = [_sorted_values(settings[name]) for name in names]
    table = np.full(tuple(map(len, labels)), np.nan)
    for run, value in enumerate(values):
        cell = tuple(labels[i].index(settings[names[i]][run]) for i in range(2))
        if math.isfinite(value) and not sign * table[cell] >= sign * value:
            table[cell] = value
    low, high = np.nanmin(table), np.nanmax(table)
    shades = (table - low) / ((high - low) or 1.0)
    rows, columns = (
        (name, [shown_value(str(x)) for x in each])
        for name, each in zip(names, labels, strict=True)
    )
    return HeatMap(rows, columns, table, shades if sign > 0 else 1 - shades)


def _sorted_values(values: Sequence[Any]) -> list[Any]:
    distinct = [x for i, x in enumerate(values) if x not in values[:i]]
    if all(isinstance(x, int | float) for x in distinct):
        return sorted(distinct)
    return distinct
