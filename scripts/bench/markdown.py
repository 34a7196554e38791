"""Tables in Markdown."""

from collections.abc import Sequence


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table; all columns but the first are aligned right."""
    rule = ["---", *["---:"] * (len(headings) - 1)]
    lines = ["| " + " | ".join(row) + " |" for row in (headings, *rows)]
    return [lines[0], "|" + "|".join(rule) + "|", *lines[1:]]
