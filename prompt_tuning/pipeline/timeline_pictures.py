"""A pipeline's timeline as text and as SVG."""

import html
import string
from typing import NamedTuple

from prompt_tuning.pipeline.schedules import Kind
from prompt_tuning.pipeline.simulation import TimedOperation, Timeline


class Drawing(NamedTuple):
    """How a kind of operation is drawn.

    Attributes:
      letter: its letter in text.
      meaning: its name in the legend.
      color: color of its bars, light enough for black digits, after ColorBrewer.
    """

    letter: str
    meaning: str
    color: str


DRAWINGS = {
    Kind.FORWARD: Drawing("F", "forward", "#9ecae1"),
    Kind.BACKWARD: Drawing("B", "backward", "#fdae6b"),
    Kind.INPUT_GRADIENT: Drawing("p", "p1, gradient of the input", "#fdae6b"),
    Kind.WEIGHT_GRADIENT: Drawing("w", "p2, gradient of the weights", "#a1d99b"),
    Kind.PREFIX_FORWARD: Drawing("P", "prompt forward", "#3182bd"),
    Kind.PREFIX_BACKWARD: Drawing("Q", "prompt backward", "#e6550d"),
}
WAITING = "."
WIDTH = 100
"""Columns of a timeline as text."""

ROW, BAR = 34, 26
"""Heights of a stage's row and of its bars, in pixels."""
LEFT, RIGHT, TOP, LEGEND = 70, 20, 16, 46
PICTURE_WIDTH = 960
DIGIT = 7
"""Width of a digit."""


def timeline_text(timeline: Timeline, width: int = WIDTH) -> str:
    """Draws a line for each stage, followed by a legend.

    An operation is its letter and its micro-batch, and dashes fill its time. With
    virtual stages, a small letter after the micro-batch is the stage's chunk.
    """
    scale = width / timeline.makespan
    lines = []
    for stage in range(timeline.stages):
        cells = [WAITING] * width
        for timed in _drawn(timeline, stage):
            first, last = round(timed.start * scale), round(timed.end * scale)
            letter = DRAWINGS[timed.operation.kind].letter
            label = f"{letter}{_number(timeline, timed)}"
            fill = letter if len(label) > last - first else "-"
            text = label if len(label) <= last - first else ""
            cells[first:last] = text.ljust(last - first, fill)
        lines.append(f"stage {stage}  {''.join(cells)}")
    legend = "; ".join(f"{x.letter} {x.meaning}" for x in _drawings(timeline))
    if timeline.chunks > 1:
        legend += f"; a to {chunk_letter(timeline.chunks - 1)} chunk of the stage"
    return "\n".join([*lines, f"{legend}; {WAITING} waiting"])


def _number(timeline: Timeline, timed: TimedOperation) -> str:
    """Returns an operation's micro-batch, and its chunk if there is more than one."""
    _, microbatch, chunk = timed.operation
    return f"{microbatch}{chunk_letter(chunk) if timeline.chunks > 1 else ''}"


def chunk_letter(chunk: int) -> str:
    """Returns a letter for a chunk, or its number in brackets after z."""
    letters = string.ascii_lowercase
    return letters[chunk] if chunk < len(letters) else f"[{chunk}]"


def _drawn(timeline: Timeline, stage: int) -> list[TimedOperation]:
    return [
        timed
        for timed in timeline.spans
        if timed.stage == stage and timed.end > timed.start
    ]


def _drawings(timeline: Timeline) -> list[Drawing]:
    """Returns how the kinds of operations in a timeline are drawn."""
    stages = range(timeline.stages)
    kinds = {timed.operation.kind for s in stages for timed in _drawn(timeline, s)}
    return [drawing for kind, drawing in DRAWINGS.items() if kind in kinds]


def timeline_svg(timeline: Timeline, title: str) -> str:
    """Draws a row for each stage, with a legend below."""
    scale = (PICTURE_WIDTH - LEFT - RIGHT) / timeline.makespan
    height = TOP + ROW * timeline.stages + LEGEND
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{PICTURE_WIDTH}" '
        f'height="{height}" font-family="sans-serif" font-size="12">',
        f"<title>{html.escape(title)}</title>",
        f'<rect width="{PICTURE_WIDTH}" height="{height}" fill="white"/>',
    ]
    for stage in range(timeline.stages):
        top = TOP + ROW * stage
        parts.append(f'<text x="8" y="{top + 17}">stage {stage}</text>')
        width = timeline.makespan * scale
        parts.append(_bar(float(LEFT), top, width, "#f0f0f0", ""))
        for timed in _drawn(timeline, stage):
            color = DRAWINGS[timed.operation.kind].color
            left, width = LEFT + timed.start * scale, (timed.end - timed.start) * scale
            label = _number(timeline, timed)
            wide_enough = width > DIGIT * len(label) + 2
            parts.append(_bar(left, top, width, color, label * wide_enough))
    parts += _legend(timeline, height - 18)
    return "\n".join([*parts, "</svg>\n"])


def _bar(left: float, top: int, width: float, color: str, label: str) -> str:
    bar = (
        f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{BAR}" '
        f'fill="{color}" stroke="white"/>'
    )
    if not label:
        return bar
    middle = f'x="{left + width / 2:.2f}" y="{top + 17}"'
    return f'{bar}<text {middle} text-anchor="middle">{label}</text>'


def _legend(timeline: Timeline, bottom: int) -> list[str]:
    shown = [(drawing.color, drawing.meaning) for drawing in _drawings(timeline)]
    parts, left = [], LEFT
    for color, meaning in [*shown, ("#f0f0f0", "waiting")]:
        parts.append(
            f'<rect x="{left}" y="{bottom - 11}" width="14" height="14" '
            f'fill="{color}"/><text x="{left + 20}" y="{bottom}">{meaning}</text>'
        )
        left += 38 + DIGIT * len(meaning)
    return parts
