"""Plots the similarities of prompts."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from prompt_tuning.core.picture_files import write_picture

MAXIMUM_WITH_NUMBERS = 16
INCHES_PER_PROMPT = 0.55
DIAGONAL_COLOR = "#e4e4e4"
MAXIMUM_NAME_LENGTH = 32


def plot_similarities(
    names: Sequence[str],
    similarities: Float[np.ndarray, "k k"],
    title: str,
    file: Path,
) -> None:
    """Draws a heat map.

    The colors span the similarities of different prompts, so that small differences are
    visible. The diagonal is gray.
    """
    size = min(max(INCHES_PER_PROMPT * len(names), 2.2), 14.0)
    with matplotlib.rc_context({"font.size": 9, "axes.titlesize": 10}):
        figure = Figure(figsize=(size + 3.4, size + 1.6), layout="constrained")
        ax = figure.subplots()
        low, high = _range(similarities)
        distinct = np.ma.array(similarities, mask=np.eye(len(names), dtype=bool))
        palette = matplotlib.colormaps["viridis"].with_extremes(bad=DIAGONAL_COLOR)
        image = ax.imshow(distinct, cmap=palette, vmin=low, vmax=high)
        _label_axes(ax, [_shorten(name) for name in names])
        if len(names) <= MAXIMUM_WITH_NUMBERS:
            _write_numbers(ax, similarities, low, high)
        ax.set_title(title)
        figure.colorbar(image, ax=ax, label="cosine similarity")
        write_picture(figure, file)


def _range(similarities: Float[np.ndarray, "k k"]) -> tuple[float, float]:
    """Returns the lowest and highest similarity of two different prompts."""
    distinct = similarities[~np.eye(len(similarities), dtype=bool)]
    low, high = float(distinct.min()), float(distinct.max())
    return (low, high) if high - low > 1e-6 else (low - 0.5, high + 0.5)


def _label_axes(ax: Axes, names: Sequence[str]) -> None:
    ticks = np.arange(len(names))
    ax.set_xticks(ticks, names, rotation=45, ha="right", rotation_mode="anchor")
    ax.set_yticks(ticks, names)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def _write_numbers(
    ax: Axes, similarities: Float[np.ndarray, "k k"], low: float, high: float
) -> None:
    """Writes each similarity into its cell, dark on light or light on dark."""
    decimals = 2 if high - low > 0.1 else 3
    for (row, column), value in np.ndenumerate(similarities):
        light = row == column or value > (low + high) / 2
        ax.text(
            column,
            row,
            f"{value:.{decimals}f}",
            ha="center",
            va="center",
            color="black" if light else "white",
        )


def _shorten(name: str) -> str:
    """Keeps the end of a long name, where paths differ."""
    return (
        name
        if len(name) <= MAXIMUM_NAME_LENGTH
        else f"…{name[1 - MAXIMUM_NAME_LENGTH :]}"
    )
