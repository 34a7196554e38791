"""Charts as SVG text, colored by the classes of the page's style sheet."""

import html
from collections.abc import Mapping, Sequence
from typing import NamedTuple

WIDTH = 480
LABEL = 78
"""Width of the column of case names."""

ROW = 50


class Pair(NamedTuple):
    """Two bars of one case.

    Attributes:
      name: name of the case.
      values: our value and PEFT's. The longer bar is as wide as the chart, because the
        cases differ too much for one scale.
      texts: label of each bar.
      ratio: label of both bars.
    """

    name: str
    values: tuple[float, ...]
    texts: tuple[str, ...]
    ratio: str


class Share(NamedTuple):
    """Parts of one bar as fractions of 1, and the minimum of their sum."""

    name: str
    plain: float
    batched: float
    limit: float | None


def pairs(rows: Sequence[Pair]) -> str:
    """Draws two bars for each row, one above the other."""
    room = WIDTH - LABEL - 56 - 84
    parts = []
    for i, row in enumerate(rows):
        top = i * ROW
        parts.append(_text(0, top + 26, row.name))
        scale = room / max(row.values)
        for j, (kind, value, text) in enumerate(
            zip(("ours", "peft"), row.values, row.texts, strict=True)
        ):
            y, size = top + 5 + 18 * j, max(value * scale, 2)
            parts.append(_bar(LABEL, y, size, 15, kind))
            parts.append(_text(LABEL + size + 7, y + 12, text, "soft"))
        parts.append(_text(WIDTH, top + 26, row.ratio, "strong end"))
    return _svg(len(rows) * ROW, parts)


def stacks(rows: Sequence[Share]) -> str:
    """Draws one divided bar for each row, with a dashed line at its limit."""
    room = WIDTH - LABEL - 56
    parts = []
    for i, row in enumerate(rows):
        top = i * 34 + 6
        parts.append(_text(0, top + 15, row.name))
        parts.append(_bar(LABEL, top, room, 20, "rest"))
        total = min(row.plain + row.batched, 1.0)
        parts.append(_bar(LABEL, top, total * room, 20, "batched"))
        parts.append(_bar(LABEL, top, min(row.plain, 1.0) * room, 20, "ours"))
        if row.limit is not None:
            x = LABEL + row.limit * room
            parts.append(_line(x, top - 4, x, top + 24, "limit"))
        share = f"{row.plain + row.batched:.0%}"
        parts.append(_text(WIDTH, top + 15, share, "strong end"))
    return _svg(len(rows) * 34 + 6, parts)


def lines(x_values: Sequence[int], rows: Mapping[str, Sequence[float]]) -> str:
    """Draws one line for each side."""
    left, right, top, bottom = 40, WIDTH - 64, 16, 220
    highest = max(1.5, *(value for values in rows.values() for value in values))

    def point_at(x: float, y: float) -> tuple[float, float]:
        return (
            left + (right - left) * x / max(x_values),
            bottom - (bottom - top) * y / highest,
        )

    parts = []
    for mark in _marks(highest):
        _, y = point_at(0, mark)
        parts.append(_line(left, y, right, y, "axis"))
        parts.append(_text(left - 8, y + 4, f"{mark:g}x", "soft end"))
    for x in x_values:
        parts.append(_text(point_at(x, 0)[0], bottom + 20, f"P = {x}", "soft middle"))
    for side, values in sorted(rows.items(), reverse=True):
        points = [point_at(*point) for point in zip(x_values, values, strict=True)]
        coordinates = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline class="line-{side}" points="{coordinates}"/>')
        parts += [
            f'<circle class="{side}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
            for x, y in points
        ]
        x, y = points[-1]
        parts.append(_text(x + 10, y + 5, f"{values[-1]:.2f}x", "strong"))
    return _svg(bottom + 30, parts)


def _marks(highest: float) -> list[float]:
    """Returns at most six round numbers from zero to the highest."""
    step = next(s for s in (0.5, 1, 2, 5, 10, 20, 50, 1e9) if highest / s <= 5)
    return [step * i for i in range(int(highest / step) + 1)]


def _svg(height: float, parts: Sequence[str]) -> str:
    box = f"0 0 {WIDTH} {height:g}"
    body = "\n".join(parts)
    return f'<svg viewBox="{box}" role="img">\n{body}\n</svg>'


def _bar(x: float, y: float, width: float, height: float, kind: str) -> str:
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
        f'height="{height:g}" rx="2"/>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line class="{kind}" {ends}/>'


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{html.escape(text)}</text>'
