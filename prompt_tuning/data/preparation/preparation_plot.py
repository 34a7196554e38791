"""Plots a preparation: lengths of its examples, and token types by position."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from prompt_tuning.core import picture_files, token_weights
from prompt_tuning.data.preparation import split_writer

TYPE_STYLES = {
    token_weights.PROMPT: ("prompt", "#8aa4c8"),
    token_weights.COMPLETION: ("completion", "#3b8f5a"),
    token_weights.SEPARATOR: ("separator", "#c8503c"),
    token_weights.PADDING: ("padding", "#e4e4e4"),
}
MAXIMUM_COLUMNS = 512
"""Maximum number of positions drawn; longer sequences are averaged."""


def plot_metrics(metrics: Mapping[str, split_writer.SplitMetrics], file: Path) -> None:
    """Draws one row per split as PNG; equal metrics give equal bytes."""
    figure = Figure(figsize=(11, 3.2 * len(metrics)), layout="constrained")
    axes = figure.subplots(len(metrics), 2, squeeze=False)
    for (left, right), (name, split) in zip(axes, metrics.items(), strict=True):
        _plot_lengths(left, split)
        left.set_title(f"{name}: {split.counts['articles']:,} examples")
        _plot_types(right, split)
        right.set_title(f"{name}: {split.counts['sequences']:,} sequences")
    picture_files.write_picture(figure, file, dpi=110)


def _plot_lengths(axes: Axes, split: split_writer.SplitMetrics) -> None:
    filled = np.flatnonzero(split.length_histogram)
    bins = np.arange(filled[0], filled[-1] + 2) if len(filled) else np.arange(2)
    edges = 2.0 ** (bins / split_writer.BINS_PER_OCTAVE)
    counts = split.length_histogram[bins[:-1]]
    axes.bar(edges[:-1], counts, width=np.diff(edges), align="edge", color="#8aa4c8")
    length = split.type_histogram.shape[1]
    axes.axvline(length, color="#c8503c", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xlabel(f"tokens per example (line: sequence length, {length})")
    axes.set_ylabel("examples")


def _plot_types(axes: Axes, split: split_writer.SplitMetrics) -> None:
    length = split.type_histogram.shape[1]
    starts = np.linspace(0, length, MAXIMUM_COLUMNS, endpoint=False)
    starts = np.unique(starts.astype(int))
    # [4, L] -> [4, columns]
    totals = np.add.reduceat(split.type_histogram, starts, axis=1).astype(float)
    shares = totals / np.maximum(totals.sum(axis=0), 1)
    axes.stackplot(
        starts,
        [shares[kind] for kind in TYPE_STYLES],
        labels=[name for name, _ in TYPE_STYLES.values()],
        colors=[color for _, color in TYPE_STYLES.values()],
        step="post",
    )
    axes.set_xlim(0, length - 1)
    axes.set_ylim(0, 1)
    axes.set_xlabel("position in the sequence")
    axes.set_ylabel("share of sequences")
    axes.legend(loc="center left", fontsize="small")
