"""Print text and tables."""

from rich.console import Console
from rich.table import Table

WIDE = 200
"""Columns of a table that goes to a file or a pipe."""


def print_lines(console: Console, *lines: str) -> None:
    """Prints lines as they are, without markup and without wrapping."""
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def print_table(console: Console, table: Table) -> None:
    """Prints a table, with space for long cells if the output is not a terminal."""
    if not console.is_terminal:
        console = Console(width=WIDE, file=console.file, quiet=console.quiet)
    console.print(table)
