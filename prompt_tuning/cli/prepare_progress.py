"""How far `prompt-tuning prepare` is, and what came of it, on a terminal."""

import contextlib
import json
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

from prompt_tuning.data.preparation.output_files import METRICS

SHOWN = {
    "records": "records used",
    "malformed": "records malformed",
    "malformed_files": "files malformed",
    "without_completion": "records without completion",
    "articles": "articles",
    "dropped_articles": "articles dropped, too long",
    "truncated_articles": "articles truncated",
    "sequences_without_completion": "sequences dropped, nothing learned",
    "sequences": "sequences",
    "prompt_tokens": "prompt tokens",
    "completion_tokens": "completion tokens",
    "separator_tokens": "separators",
    "padding_tokens": "padding",
    "share_of_positions_used": "positions used",
    "share_of_tokens_kept": "tokens kept",
}


class BarReporter:
    """A bar for each stage.

    Args:
      progress: where the bars are.
    """

    def __init__(self, progress: Progress):
        self._progress = progress
        self._task: TaskID | None = None

    def begin(self, stage: str, total: int) -> None:
        """A stage begins."""
        self._task = self._progress.add_task(stage, total=total)

    def advance(self, amount: int) -> None:
        """Some of it is done."""
        if self._task is not None:
            self._progress.advance(self._task, amount)

    def say(self, text: str) -> None:
        """A line above the bars."""
        self._progress.console.print(text, markup=False, highlight=False)


@contextlib.contextmanager
def shown_progress(console: Console) -> Iterator[BarReporter]:
    """Bars while the block runs; none where there is no terminal to draw them."""
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
    """What an output's metrics say, a column for each split."""
    metrics = json.loads((output / METRICS).read_text(encoding="utf-8"))
    table = Table("", *metrics)
    for name, title in SHOWN.items():
        cells = [_shown(split[name]) for split in metrics.values()]
        table.add_row(title, *cells)
    return table


def _shown(value: int | float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.1%}"
