"""Plot the quality of memories against their compression."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from prompt_tuning.core.picture_files import write_picture
from prompt_tuning.texts.memory_comparison import (
    FIRST_TOKENS,
    MEMORY,
    RETRIEVED,
    SUMMARY,
    Measured,
)

LINES = (MEMORY, RETRIEVED, SUMMARY, FIRST_TOKENS)
QUALITIES = {
    "exact_match": "exact answers",
    "closed": "divergence behind nothing that is gone",
}


def plot_memories(memories: Sequence[Measured], file: Path) -> None:
    """Plots results of `measure_memory` for memories of the same text.

    Quality is the share of exact answers if measured, else of the divergence that is
    gone.
    """
    asked = all("exact_match" in measured[MEMORY] for measured in memories)
    quality = "exact_match" if asked else "closed"
    figure = Figure(figsize=(5, 3.6), layout="constrained")
    ax = figure.subplots()
    sizes = set()
    for name in LINES:
        points = sorted(
            (measured[name]["compression"], measured[name][quality])
            for measured in memories
            if quality in measured.get(name, {})
        )
        if points:
            ax.plot(*zip(*points, strict=True), marker="o", label=name)
            sizes |= {compression for compression, _ in points}
    last = [*memories[0]][-1]
    if quality in memories[0][last]:
        ax.axhline(memories[0][last][quality], color="0.5", ls=":", label=last)
    ax.set_xscale("log")
    ax.set_xticks(sorted(sizes))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.1f}x"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    ax.set_xlabel("tokens of the text per slot")
    ax.set_ylabel(QUALITIES[quality])
    ax.set_ylim(min(0.0, ax.get_ylim()[0]), 1.05)
    ax.legend(frameon=False)
    write_picture(figure, file)
