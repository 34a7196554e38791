"""Plot each member's curves, with the best one highlighted."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from prompt_tuning.core.picture_files import write_picture
from prompt_tuning.training.metrics_log import EVALUATION
from prompt_tuning.training.sweep.sweep_summary import MemberResult, SweepSummary

CURVES_FILE = "curves.png"
BEST_COLOR = "#c1272d"
DIVERGED_COLOR = "#9a9a9a"
LISTED = 16


def plot_curves(summary: SweepSummary, file: Path) -> None:
    """Plots the training loss and the held-out metric that members are compared by."""
    metrics = ["loss"]
    if EVALUATION + summary.by[0] in summary.evaluated:
        metrics.append(EVALUATION + summary.by[0])
    colors = _colors(summary)
    with matplotlib.rc_context({"font.size": 9, "axes.titlesize": 10}):
        figure = Figure(figsize=(4.4 * len(metrics) + 2.6, 4.2), layout="constrained")
        panels = figure.subplots(1, len(metrics), sharex=True, squeeze=False)[0]
        for ax, metric in zip(panels, metrics, strict=True):
            curves = [
                _draw(
                    ax, result, metric, colors[result.name], result.name == summary.best
                )
                for result in summary.results
                if result.curve(metric)
            ]
            _finish(ax, metric, curves)
        _add_legend(figure, summary, colors)
        write_picture(figure, file)


def _colors(summary: SweepSummary) -> dict[str, Any]:
    """Returns a color per member, dark to light in order; red for the best."""
    palette = matplotlib.colormaps["viridis"]
    last = max(len(summary.results) - 1, 1)
    colors: dict[str, Any] = {
        result.name: DIVERGED_COLOR if result.diverged else palette(0.9 * index / last)
        for index, result in enumerate(summary.results)
    }
    return colors | ({summary.best: BEST_COLOR} if summary.best else {})


def _draw(
    ax: Axes, result: MemberResult, metric: str, color: Any, best: bool
) -> Float[np.ndarray, "n"]:
    """Draws one member's curve and returns its values."""
    steps, values = map(np.asarray, zip(*result.curve(metric), strict=True))
    training = not metric.startswith(EVALUATION)
    drawn = running_mean(values) if training else values
    ax.plot(
        steps,
        drawn,
        color=color,
        linewidth=2.4 if best else 1.2,
        alpha=1 if best else 0.8,
        linestyle=":" if result.diverged else "-",
        marker=None if training else "o",
        markersize=4 if best else 2.5,
        zorder=3 if best else 2,
    )
    if best and training:
        ax.plot(steps, values, color=color, alpha=0.2, linewidth=0.8)
    if result.diverged:
        ax.plot(steps[-1:], drawn[-1:], "x", color=color)
    if best and not training:
        chosen = steps == result.best_step
        ax.plot(steps[chosen], drawn[chosen], "*", color=color, markersize=13, zorder=4)
    return drawn


def _finish(ax: Axes, metric: str, curves: Sequence[np.ndarray]) -> None:
    training, name = not metric.startswith(EVALUATION), metric.removeprefix(EVALUATION)
    every = np.concatenate(curves) if curves else np.ones(1)
    if name == "loss" and every.min() > 0 and every.max() > 8 * every.min():
        ax.set_yscale("log")
        # Plain numbers at 1, 2 and 5, because powers of ten are hard to read as losses.
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_title("training loss, running mean" if training else f"held-out {name}")
    ax.set_xlabel("step")
    if name == "loss":
        ax.set_ylabel("nats per token")
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)


def _add_legend(figure: Figure, summary: SweepSummary, colors: dict[str, Any]) -> None:
    """Lists the members, best first; diverged ones, which have no value, last."""
    sign = 1 if summary.by[1] == "min" else -1
    ranked = sorted(
        summary.results,
        key=lambda r: np.inf if r.best_value is None else sign * r.best_value,
    )
    shown = ranked[:LISTED]
    left_out = f", {LISTED} of {len(ranked)}" if len(ranked) > LISTED else ""
    legend = figure.legend(
        [
            Line2D(
                [],
                [],
                color=colors[result.name],
                linewidth=2.4 if result.name == summary.best else 1.2,
                linestyle=":" if result.diverged else "-",
            )
            for result in shown
        ],
        [_label(result) for result in shown],
        loc="outside right upper",
        frameon=False,
        title=f"best {summary.by[0]} first{left_out}",
        alignment="left",
    )
    for text, result in zip(legend.get_texts(), shown, strict=True):
        if result.name == summary.best:
            text.set_fontweight("bold")


def _label(result: MemberResult) -> str:
    name = ", ".join(f"{key} {value}" for key, value in result.varies.items())
    name = name if len(name) <= 48 else f"{name[:45]}..."
    value = "-" if result.best_value is None else f"{result.best_value:.4f}"
    return f"{value}  {name}{'  (diverged)' if result.diverged else ''}"


def running_mean(values: Float[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
    """Returns an unbiased exponential mean over about a tenth of the curve."""
    decay = 1 - 1 / max(1, len(values) // 10)
    mean, weight, means = 0.0, 0.0, np.empty(len(values))
    for index, value in enumerate(values):
        mean, weight = decay * mean + value, decay * weight + 1
        means[index] = mean / weight
    return means
