"""The command `prompt-tuning show`: prints rows of data as text colored by token type.

Help must be instant, so the modules behind the options import nothing heavy.
"""

import argparse
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from prompt_tuning.cli.option_types import numeric
from prompt_tuning.cli.run_options import add_table_options
from prompt_tuning.cli.shared_options import add_tokenizer_option, refuse_bindings
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.number_ranges import NonnegativeNumber

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from prompt_tuning.data.tools.row_display import ShownRow, ShownToken

HELP = "print rows of data as text, colored by what is learned"
USES_JAX = False
DESCRIPTION = (
    "Prints rows of HDF5 files or of files of text. The color of a token shows its "
    "type, and the color's intensity its loss weight; without a color terminal, marks "
    "show both."
)
NAMES = ("prompt", "completion", "padding", "separator")
SHADES = (
    ("#5f87d7", "#87afff"),
    ("#5faf5f", "#87d787"),
    ("#6c6c6c", "#8a8a8a"),
    ("#d75faf", "#ff87d7"),
)
"""Two shades per type, used alternately to distinguish neighboring tokens."""

FIRST_ROWS = 3
TEXT_OPTIONS = (
    *("prompt_key", "completion_key", "format"),
    *("chat", "chat_template", "chat_date", "chat_template_kwargs", "turns"),
)
"""Options for text files."""

ROW_ENDS = 1000
"""Number of tokens that the table of a long row shows at its start and at its end."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.description = DESCRIPTION
    parser.add_argument(
        "file",
        metavar="FILE",
        help="a data file (.hdf5, .jsonl, .json, .csv, .tsv, .parquet, or compressed: "
        ".jsonl.gz, .jsonl.zst), a glob, or a folder of such files",
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        metavar="ROW",
        help="numbers from 0, or ranges: 10-12, or 10:13 without 13 (default: "
        "the first three)",
    )
    add_tokenizer_option(parser, "; without it HDF5 rows are shown as ids")
    parser.add_argument(
        "--prompt_loss_weight",
        type=numeric(NonnegativeNumber),
        default=0.0,
        metavar="W",
        help="loss weight of prompt tokens",
    )
    parser.add_argument(
        "--tokens", action="store_true", help="print a table with one token per line"
    )
    add_table_options(parser, TEXT_OPTIONS)


def run(options: argparse.Namespace) -> int:
    """Prints the rows and a legend."""
    from rich.console import Console

    from prompt_tuning.data.rows.line_formats import FormatChoice
    from prompt_tuning.data.text.tokenizers import load_tokenizer
    from prompt_tuning.data.tools.row_display import display_row, open_rows

    refuse_bindings(options)
    tokenizer = None
    if options.tokenizer is not None:
        tokenizer = load_tokenizer(options.tokenizer)
    path = Path(options.file)
    keys = {
        "prompt_key": options.prompt_key,
        "completion_key": options.completion_key,
        "add_eos": tokenizer is not None and tokenizer.eos_id is not None,
        "choice": FormatChoice.of(options),
    }
    rows = open_rows(path, tokenizer, **keys)
    numbers = row_numbers(options.rows, len(rows))
    console = Console()
    colored = console.is_terminal and console.color_system is not None
    shown = [
        display_row(
            rows, number, tokenizer, prompt_loss_weight=options.prompt_loss_weight
        )
        for number in numbers
    ]
    console.print(legend(colored), soft_wrap=True)
    left_out = ""
    if rows.without_completion:
        count = rows.without_completion
        left_out = f"; {count:,} left out: they have no completion"
    if rows.repetition.conversations:
        left_out += f"; {rows.repetition}"
    console.print(
        f"{path}: {len(rows):,} rows{left_out}", markup=False, highlight=False
    )
    for row in shown:
        console.print()
        console.print(_heading(row), soft_wrap=True)
        if options.tokens:
            _print_tokens(console, row)
        else:
            console.print(row_text(row, colored), soft_wrap=not colored)
    return 0


def row_numbers(ranges: list[str] | None, count: int) -> list[int]:
    """Expands row numbers and ranges, e.g. 0, 10-12 and 0:2 (0 and 1).

    Args:
      ranges: the numbers and ranges; None for the first rows.
      count: number of rows in the file.

    Raises:
      InputError: if a range is invalid or outside the file.
    """
    if ranges is None:
        return list(range(min(FIRST_ROWS, count)))
    numbers = []
    for text in ranges:
        match = re.fullmatch(r"(\d{1,15})(?:([-:])(\d{1,15}))?", text)
        if match is None:
            raise InputError(
                f"--rows has {shown(text)}, expected a number from 0, or a range such "
                "as 10-12 or 10:13, both of which are the rows 10, 11 and 12"
            )
        # As in Python, the row after the colon is not included.
        last = int(match[3] or match[1]) - (match[2] == ":")
        first = int(match[1])
        if not first <= last < count:
            raise InputError(
                f"--rows has {text}, expected rows from 0 to {count - 1}, the last row "
                "of the file"
            )
        numbers += range(first, last + 1)
    return numbers


def legend(colored: bool) -> "Text":
    """Returns the legend of the colors or marks."""
    from rich.text import Text

    if not colored:
        return Text(
            "[TYPE xWEIGHT|text] for consecutive tokens of one type and loss weight; a "
            "weight of 1 is omitted"
        )
    parts: list[Text | str | tuple[str, str]] = []
    for name, (dark, light) in zip(NAMES, SHADES, strict=True):
        half = len(name) // 2
        parts += [(name[:half], dark), (name[half:], light), "  "]
    weights = ("weight 0", "dim"), ", ", ("below 1", "italic"), ", ", ("1", "bold")
    return Text.assemble(*parts, " ", *weights, ", ", ("above 1", "bold underline"))


def row_text(row: "ShownRow", colored: bool) -> "Text":
    """Returns a row as text, with colors or marks."""
    from rich.text import Text

    text = Text()
    for (kind, weight), tokens in _group_tokens(row):
        if kind == NAMES.index("padding") and len(tokens) > 1:
            # Padding is shown as one token and a count.
            summary = f"{tokens[0].text.strip()} ×{len(tokens)}"
            texts = [(summary, 0)]
        else:
            texts = [(token.text, token.position % 2) for token in tokens]
        if colored:
            for token_text, shade in texts:
                text.append(token_text, f"{SHADES[kind][shade]} {_style(weight)}")
        else:
            factor = "" if weight == 1 else f" x{weight:g}"
            text.append(f"[{NAMES[kind]}{factor}|")
            text.append("".join(token_text for token_text, _ in texts) + "]")
    return text


def _group_tokens(
    row: "ShownRow",
) -> Iterator[tuple[tuple[int, float], list["ShownToken"]]]:
    """Groups consecutive tokens of equal type and weight."""
    groups = itertools.groupby(row.tokens, key=lambda token: (token.type, token.weight))
    return ((key, list(tokens)) for key, tokens in groups)


def _style(weight: float) -> str:
    if weight == 0:
        return "dim"
    if weight < 1:
        return "italic"
    return "bold" if weight == 1 else "bold underline"


def _heading(row: "ShownRow") -> "Text":
    """Returns the row's number, its line, and its number of tokens per type."""
    from rich.text import Text

    counts = Counter(token.type for token in row.tokens)
    parts = ", ".join(f"{counts[i]} {n}" for i, n in enumerate(NAMES) if counts[i])
    learned = sum(token.weight != 0 for token in row.tokens)
    text = Text(f"row {row.number}", style="bold")
    line = row.location.rpartition(", ")[2]
    text.append(f", {line}" if line.startswith("line") else "", style="not bold")
    types = parts if row.typed else "no types, so all are learned"
    rest = f": {len(row.tokens)} tokens ({types}), {learned} of them learned"
    return text.append(rest, style="not bold")


def _print_tokens(console: "Console", row: "ShownRow") -> None:
    """Prints a table with one token per line, without padding at the end.

    For a long row, only tokens at its start and end are printed.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table("position", "id", "text", "type", "weight")
    last = max(
        (t.position for t in row.tokens if t.type != NAMES.index("padding")), default=-1
    )
    tokens = row.tokens[: last + 1]
    left_out = max(len(tokens) - 2 * ROW_ENDS, 0)
    for token in tokens:
        if left_out and token.position == ROW_ENDS:
            table.add_row("...", "", Text(f"{left_out:,} tokens are left out"))
        if ROW_ENDS <= token.position < ROW_ENDS + left_out:
            continue
        style = f"{SHADES[token.type][0]} {_style(token.weight)}"
        table.add_row(
            str(token.position),
            str(token.id),
            Text(repr(token.text)),
            Text(f"{token.type} {NAMES[token.type]}", style=style),
            f"{token.weight:g}",
        )
    console.print(table)
