"""The table that `prompt-tuning prepare` prints."""

from pathlib import Path

from rich.table import Table

from prompt_tuning.core.typed_json import read_object
from prompt_tuning.data.preparation.output_files import METRICS

TITLES = {
    "records": "records used",
    "malformed": "records malformed",
    "malformed_files": "files malformed",
    "without_completion": "records without completion",
    "articles": "examples",
    "repeated_tokens": "tokens read more than once",
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
"""Titles of the table's rows, by key in the metrics."""


def metrics_table(output: Path) -> Table:
    """Returns a table of an output's metrics, with a column per split."""
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
