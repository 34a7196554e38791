"""Terminal output of `prompt-tuning prepare`: progress bars and metrics."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from prompt_tuning.core.typed_json import read_object
from prompt_tuning.data.preparation.output_files import METRICS

TITLES = {
    "records": "records used",
    "malformed": "records malformed",
    "malformed_files": "files malformed",
    "without_completion": "records without completion",
    "articles": "examples",
    "dropped_articles": "examples dropped, too long",
    "truncated_articles": "examples truncated",
    "sequences_without_completion": "sequences dropped, no learned tokens",
    "sequences": "sequences",
    "prompt_tokens": "prompt tokens",
    "completion_tokens": "completion tokens",
    "separator_tokens": "separator tokens",
    "padding_tokens": "padding tokens",
    "share_of_positions_used": "positions used",
    "share_of_tokens_kept": "tokens kept",
}
"""Titles of the table's rows by their key in the metrics."""


class BarReporter:
    """A `PreparationReporter` that shows a progress bar for each stage.

    Args:
      progress: display of the bars.
    """

    def __init__(self, progress: Progress):
        self._progress = progress
        self._task: TaskID | None = None

    def begin(self, stage: str, total: int) -> None:
        """Adds the bar of a stage."""
        self._task = self._progress.add_task(stage, total=total)

    def advance(self, amount: int) -> None:
        """Advances the bar of the current stage."""
        if self._task is not None:
            self._progress.advance(self._task, amount)

    def log(self, text: str) -> None:
        """Prints a line above the bars."""
        self._progress.console.print(text, markup=False, highlight=False)


@contextlib.contextmanager
def show_progress(console: Console) -> Iterator[BarReporter]:
    """Shows progress bars while the block runs, if the console is a terminal."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        yield BarReporter(progress)


def metrics_table(output: Path) -> Table:
    """Returns a table of an output's metrics with a column for each split."""
    metrics = read_object(output / METRICS).values
    table = Table("", *metrics)
    for name, title in TITLES.items():
        cells = [_format(split[name]) for split in metrics.values()]
        table.add_row(title, *cells)
    return table


def _format(value: int | float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.1%}"
