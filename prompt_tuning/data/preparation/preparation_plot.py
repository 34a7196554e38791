"""A picture of a preparation: how long its articles are, and what stands where."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from prompt_tuning.core.token_weights import COMPLETION, PADDING, PROMPT, SEPARATOR
from prompt_tuning.data.preparation.preparation_metrics import PER_OCTAVE, SplitMetrics

KINDS = {
    PROMPT: ("prompt", "#8aa4c8"),
    COMPLETION: ("completion", "#3b8f5a"),
    SEPARATOR: ("separator", "#c8503c"),
    PADDING: ("padding", "#e4e4e4"),
}
COLUMNS = 512
"""Most positions drawn; more are averaged."""


def draw(metrics: Mapping[str, SplitMetrics], file: Path) -> None:
    """Draws a row for each split, as PNG; the same metrics give the same bytes."""
    figure = Figure(figsize=(11, 3.2 * len(metrics)), layout="constrained")
    axes = figure.subplots(len(metrics), 2, squeeze=False)
    for (left, right), (name, split) in zip(axes, metrics.items(), strict=True):
        _draw_lengths(left, split)
        left.set_title(f"{name}: {split.counts['articles']:,} articles")
        _draw_types(right, split)
        right.set_title(f"{name}: {split.counts['sequences']:,} sequences")
    figure.savefig(file, format="png", dpi=110, metadata={"Software": None})


def _draw_lengths(axes: Axes, split: SplitMetrics) -> None:
    filled = np.flatnonzero(split.length_histogram)
    bins = np.arange(filled[0], filled[-1] + 2) if len(filled) else np.arange(2)
    edges = 2.0 ** (bins / PER_OCTAVE)
    counts = split.length_histogram[bins[:-1]]
    axes.bar(edges[:-1], counts, width=np.diff(edges), align="edge", color="#8aa4c8")
    length = split.type_histogram.shape[1]
    axes.axvline(length, color="#c8503c", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xlabel(f"tokens of an article; the line is a sequence, {length}")
    axes.set_ylabel("articles")


def _draw_types(axes: Axes, split: SplitMetrics) -> None:
    length = split.type_histogram.shape[1]
    starts = np.unique(np.linspace(0, length, COLUMNS, endpoint=False).astype(int))
    totals = np.add.reduceat(split.type_histogram, starts, axis=1).astype(float)
    shares = totals / np.maximum(totals.sum(axis=0), 1)
    axes.stackplot(
        starts,
        [shares[kind] for kind in KINDS],
        labels=[name for name, _ in KINDS.values()],
        colors=[colour for _, colour in KINDS.values()],
        step="post",
    )
    axes.set_xlim(0, length - 1)
    axes.set_ylim(0, 1)
    axes.set_xlabel("position in the sequence")
    axes.set_ylabel("share of sequences")
    axes.legend(loc="center left", fontsize="small")
