"""Draw curves and similarities as SVG, colored by the page's style sheet."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from markupsafe import Markup

from prompt_tuning.report.calibration_curve import CalibrationPoint
from prompt_tuning.report.curves import HELD_OUT, Panel, Series
from prompt_tuning.report.varied_settings import Axis
from prompt_tuning.report.visible_text import visible

WIDTH, HEIGHT = 440, 240
LEFT, RIGHT, TOP, BOTTOM = 56, 10, 28, 26
CURVE = Markup('<polyline class="curve {}" points="{}"/>')
DOT = Markup('<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="{}"/>')
TICK = Markup(
    '<line class="grid" x1="{:.1f}" x2="{:.1f}" y1="{}" y2="{}"/>'
    '<text x="{:.1f}" y="{}" text-anchor="{}">{}</text>'
)
"""A vertical line of the grid, and the label of its place."""
COLORS = 8
"""Number of colors in the style sheet; more runs repeat them with dashes."""
LARGEST_MATRIX = 64
CELLS = 384
SQUARE = 260
"""Width and height of a calibration curve."""
PARALLEL = (880, 300)
SHARES = (384, 192)
"""Width and height of the attention picture."""


@dataclasses.dataclass(frozen=True)
class Axes:
    """Maps steps and values to points of a picture."""

    last: int
    low: float
    high: float
    logarithmic: bool

    @classmethod
    def around(cls, panel: Panel) -> "Axes":
        """Returns axes that contain every point of a panel."""
        values = [value for series in panel.series for value in series.values]
        last = max(step for series in panel.series for step in series.steps)
        low, high = min(values), max(values)
        if panel.logarithmic:
            return cls(max(last, 1), low / 1.15, high * 1.15, True)
        margin = 0.05 * (high - low) or abs(high) * 0.1 or 1.0
        floor = 0.0 if low >= 0 and low - margin < 0 else low - margin
        return cls(max(last, 1), floor, high + margin, False)

    def x(self, step: int | float) -> float:
        """Returns the horizontal coordinate of a step."""
        return LEFT + (WIDTH - LEFT - RIGHT) * step / self.last

    def y(self, value: float) -> float:
        """Returns the vertical coordinate of a value."""
        scale = math.log if self.logarithmic else float
        share = (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    def value_ticks(self) -> list[float]:
        """Returns values to label: round ones, or powers of ten."""
        if not self.logarithmic:
            return _round_numbers(self.low, self.high, 4)
        first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
        every = max(1, math.ceil((last - first + 1) / 5))
        powers = [10.0**n for n in range(first, last + 1, every)]
        return powers or [self.low * 1.15, self.high / 1.15]

    def step_ticks(self) -> list[float]:
        """Returns steps to label."""
        return _round_numbers(0.0, float(self.last), 4)


def _round_numbers(low: float, high: float, count: int) -> list[float]:
    """Returns about `count` multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    unit = next(power * n for n in (1, 2, 5, 10) if power * n >= rough * 0.999)
    first, last = math.ceil(low / unit - 1e-9), math.floor(high / unit + 1e-9)
    return [n * unit for n in range(first, last + 1)]


def draw_panel(panel: Panel, marks: Sequence[tuple[int, str]]) -> Markup:
    """Draws a panel's curves. `marks` are steps with a vertical line and its label."""
    axes = Axes.around(panel)
    parts = [*_grid(axes), *_marks(axes, marks)]
    # Training curves are below held-out ones, which have fewer points.
    for series in sorted(panel.series, key=lambda x: x.kind == HELD_OUT):
        parts.append(_curve(axes, series))
    bottom = HEIGHT - BOTTOM
    parts.append(Markup('<line class="cursor" y1="{}" y2="{}"/>').format(TOP, bottom))
    return Markup("").join(parts)


def _grid(axes: Axes) -> list[Markup]:
    parts = []
    for value in axes.value_ticks():
        y = axes.y(value)
        parts.append(
            Markup(
                '<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>'
                '<text x="{}" y="{:.1f}" text-anchor="end">{}</text>'
            ).format(LEFT, WIDTH - RIGHT, y, y, LEFT - 6, y + 4, short_number(value))
        )
    for step in axes.step_ticks():
        x = axes.x(step)
        anchor = "end" if x > WIDTH - 30 else "middle"
        parts.append(
            TICK.format(
                *(x, x, HEIGHT - BOTTOM, HEIGHT - BOTTOM + 4),
                *(x, HEIGHT - 8, anchor, short_number(step)),
            )
        )
    return parts


def _marks(axes: Axes, marks: Sequence[tuple[int, str]]) -> list[Markup]:
    parts = []
    for number, (step, label) in enumerate(marks):
        x = axes.x(min(step, axes.last))
        anchor, shift = ("end", 3) if x > WIDTH / 2 else ("start", -3)
        parts.append(
            Markup(
                '<line class="mark" x1="{:.1f}" x2="{:.1f}" y1="{}" y2="{}"/>'
                '<text class="mark" x="{:.1f}" y="{}" text-anchor="{}">{}</text>'
            ).format(
                *(x, x, TOP, HEIGHT - BOTTOM),
                *(x + shift, TOP - 4 - 13 * number, anchor, label),
            )
        )
    return parts


def _curve(axes: Axes, series: Series) -> Markup:
    points = " ".join(
        f"{axes.x(step):.1f},{axes.y(value):.1f}"
        for step, value in zip(series.steps, series.values, strict=True)
    )
    kind = "held" if series.kind == HELD_OUT else "train"
    style = f"{kind} {_run_style(series.run)}"
    curve = CURVE.format(style, points)
    if len(series.steps) > 40 or (kind == "train" and len(series.steps) > 1):
        return curve
    dots = [
        DOT.format(style, axes.x(step), axes.y(value), 2.5)
        for step, value in zip(series.steps, series.values, strict=True)
    ]
    return Markup("").join([curve, *dots])


def _run_style(run: int) -> str:
    return f"c{run % COLORS} d{run // COLORS % 3}"


def short_number(value: int | float) -> str:
    """Formats a number briefly, e.g. "30k"."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    if value and abs(value) < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-")
    return f"{value:.3g}"


def draw_shares(shares: Float[np.ndarray, "L P"]) -> Markup:
    """Draws the share of attention on each vector (columns) in each block (rows).

    Full color is the largest share.
    """
    largest = max(float(shares.max()), 1e-9)
    layers, count = shares.shape
    width, height = SHARES[0] / count, SHARES[1] / layers
    cells = [
        Markup(
            '<rect class="positive" x="{:.1f}" y="{:.1f}" width="{:.2f}" '
            'height="{:.2f}" fill-opacity="{:.2f}"><title>vector {}, block {}: '
            "{:.2f} %</title></rect>"
        ).format(
            *(vector * width, layer * height, width, height),
            shares[layer, vector] / largest,
            *(vector, layer, 100 * shares[layer, vector]),
        )
        for layer in range(layers)
        for vector in range(count)
    ]
    return Markup("").join(cells)


def draw_calibration(points: Sequence[CalibrationPoint], color: int) -> Markup:
    """Draws accuracy (upwards) against the answer's probability, from 0 to 1.

    Colors repeat after `COLORS`.
    """
    side, style = SQUARE - 2 * BOTTOM, f"c{color % COLORS}"

    def at(x: float | int, y: float | int) -> tuple[float, float]:
        return float(BOTTOM + x * side), float(SQUARE - BOTTOM - y * side)

    line, text = (
        '<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>',
        ('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>'),
    )
    parts = [
        Markup(line).format("mark", *at(0, 0), *at(1, 1)),
        Markup(line).format("grid", *at(0, 0), *at(1, 0)),
        Markup(line).format("grid", *at(0, 0), *at(0, 1)),
    ]
    for value in (0, 0.5, 1):
        x, y = at(value, 0)
        parts.append(Markup(text).format(x, y + 16, "middle", value))
        x, y = at(0, value)
        parts.append(Markup(text).format(x - 4, y + 4, "end", value))
    curve = " ".join("{:.1f},{:.1f}".format(*at(x[0], x[1])) for x in points)
    parts.append(CURVE.format(f"held {style}", curve))
    parts += [DOT.format(style, *at(x.probability, x.accuracy), 3.5) for x in points]
    return Markup("").join(parts)


def draw_parallel(axes: Sequence[Axis]) -> Markup:
    """Draws runs as lines across parallel axes, with the best one highlighted."""
    width, height = PARALLEL
    left, top, bottom = 60, 40, height - 14
    last = len(axes) - 1
    step = (width - 2 * left) / max(last, 1)
    parts = []
    for run in range(len(axes[0].places)):
        points = " ".join(
            f"{left + number * step:.1f},{bottom - place * (bottom - top):.1f}"
            for number, axis in enumerate(axes)
            if not math.isnan(place := axis.places[run])
        )
        parts.append(CURVE.format(f"held {_run_style(run)}", points))
    for number, axis in enumerate(axes):
        x = left + number * step
        # Keep long names inside the picture and apart from their neighbors.
        ends = {0: (0, "start"), last: (width, "end")}
        place, anchor = ends.get(number, (x, "middle"))
        y = top - 12 - 14 * (number % 2)
        parts.append(
            TICK.format(x, x, top, bottom, place, y, anchor, visible(axis.name))
        )
        for place, label in axis.ticks:
            y = bottom - place * (bottom - top)
            parts.append(
                Markup('<text x="{:.1f}" y="{:.1f}">{}</text>').format(
                    x + 5, y + 4, visible(label)
                )
            )
    return Markup("").join(parts)


def draw_matrix(matrix: Float[np.ndarray, "P P"]) -> Markup:
    """Draws the cosines between vectors, at most `LARGEST_MATRIX` of them.

    Full color is a cosine of 1 or -1; negative cosines have another color.
    """
    count = min(len(matrix), LARGEST_MATRIX)
    side = CELLS / count
    cells = [
        Markup(
            '<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.2f}" height="{:.2f}" '
            'fill-opacity="{:.2f}"><title>{} and {}: {:.2f}</title></rect>'
        ).format(
            "negative" if matrix[row, column] < 0 else "positive",
            *(column * side, row * side, side, side),
            min(abs(float(matrix[row, column])), 1.0),
            *(row, column, float(matrix[row, column])),
        )
        for row in range(count)
        for column in range(count)
    ]
    return Markup("").join(cells)
