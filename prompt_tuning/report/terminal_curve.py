"""Draw a curve in a terminal with Braille characters, which have eight dots."""

from collections.abc import Sequence

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of each dot of a character, by row and column."""
BLANK = 0x2800
WIDTH, HEIGHT = len(DOTS[0]), len(DOTS)
"""Dots of a character."""


def draw_curve(
    steps: Sequence[int], values: Sequence[float], columns: int, rows: int
) -> list[str]:
    """Draws a curve with connected points, so no peak is lost.

    Steps ascend; values are finite. `columns` include labels, `rows` exclude the line
    of steps.

    Returns:
      `rows + 1` lines: the curve with its highest and lowest value, and its steps.
    """
    low, high = min(values), max(values)
    labels = [f"{high:.4g}", *[""] * (rows - 2), f"{low:.4g}"] if rows > 1 else [""]
    margin = max(map(len, labels))
    across = max(columns - margin - 2, 4)
    grid = [[BLANK] * across for _ in range(rows)]
    right, bottom = across * WIDTH - 1, rows * HEIGHT - 1
    span, first = (steps[-1] - steps[0]) or 1, steps[0]

    def place(step: int, value: float) -> tuple[int, int]:
        share = (high - value) / (high - low) if high > low else 0.5
        return round((step - first) / span * right), round(share * bottom)

    places = [place(*point) for point in zip(steps, values, strict=True)]
    for (x0, y0), (x1, y1) in zip(places, places[1:] or places, strict=False):
        count = max(abs(x1 - x0), abs(y1 - y0), 1)
        for i in range(count + 1):
            x, y = x0 + round((x1 - x0) * i / count), y0 + round((y1 - y0) * i / count)
            grid[y // HEIGHT][x // WIDTH] |= DOTS[y % HEIGHT][x % WIDTH]
    lines = [
        f"{label:>{margin}} │{''.join(map(chr, row))}"
        for label, row in zip(labels, grid, strict=True)
    ]
    ends = f"{steps[0]:,}", f"{steps[-1]:,}"
    gap = " " * max(across - len(ends[0]) - len(ends[1]), 1)
    return [*lines, f"{'':>{margin}}  {ends[0]}{gap}{ends[1]}"]
