"""The command `prompt-tuning show`: rows of data as text, coloured by what is learned.

What says which options there are imports nothing heavy, so that help is instant.
"""

import argparse
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from prompt_tuning.core.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from prompt_tuning.data.tools.row_display import ShownRow, ShownToken

DESCRIPTION = (
    "Prints rows of an HDF5 or jsonl file as text. A token's colour says its type, and "
    "how strong it is the weight of its loss; where there are no colours, marks say "
    "both."
)
NAMES = ("prompt", "completion", "padding", "separator")
SHADES = (
    ("#5f87d7", "#87afff"),
    ("#5faf5f", "#87d787"),
    ("#6c6c6c", "#8a8a8a"),
    ("#d75faf", "#ff87d7"),
)
"""Two of each type, in turns, so that tokens are told apart."""

FIRST_ROWS = 3


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.description = DESCRIPTION
    parser.add_argument("file", metavar="FILE", help="an HDF5 or jsonl file")
    parser.add_argument(
        "--rows",
        nargs="+",
        metavar="ROW",
        help="numbers from 0, or ranges such as 10-12; the first three by default",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="a file, or the folder of a checkpoint; without it HDF5 rows are ids",
    )
    parser.add_argument(
        "--prompt_loss_weight",
        type=float,
        default=0.0,
        metavar="W",
        help="weight of prompt tokens (0, as in the shipped runs)",
    )
    parser.add_argument(
        "--tokens", action="store_true", help="a table with a line for each token"
    )
    for name, default in (("prompt", "prompt"), ("completion", "completion")):
        parser.add_argument(
            f"--{name}_key", default=default, metavar="KEY", help="of a jsonl line"
        )


def show(options: argparse.Namespace) -> int:
    """Prints the rows, and what the colours mean."""
    from rich.console import Console

    from prompt_tuning.data.text.tokenizers import load_tokenizer
    from prompt_tuning.data.tools.row_display import open_rows, shown_row

    if options.bindings:
        raise InputError(f"show reads no config, so nothing uses {options.bindings}")
    tokenizer = None
    if options.tokenizer is not None:
        tokenizer = load_tokenizer(options.tokenizer)
    path = Path(options.file)
    keys = {
        "prompt_key": options.prompt_key,
        "completion_key": options.completion_key,
        "add_eos": tokenizer is not None and tokenizer.eos_id is not None,
    }
    rows = open_rows(path, tokenizer, **keys)
    numbers = row_numbers(options.rows, len(rows))
    console = Console()
    coloured = console.is_terminal and console.color_system is not None
    found = [
        shown_row(
            rows, number, tokenizer, prompt_loss_weight=options.prompt_loss_weight
        )
        for number in numbers
    ]
    console.print(legend(coloured), soft_wrap=True)
    console.print(f"{path}: {len(rows):,} rows", markup=False, highlight=False)
    for row in found:
        console.print()
        console.print(_heading(row), soft_wrap=True)
        if options.tokens:
            _print_tokens(console, row)
        else:
            console.print(row_text(row, coloured), soft_wrap=not coloured)
    return 0


def row_numbers(asked: list[str] | None, count: int) -> list[int]:
    """The rows that are asked for, such as 0, 5 and 10-12.

    Raises:
      InputError: if one is no number, or there is no such row.
    """
    if asked is None:
        return list(range(min(FIRST_ROWS, count)))
    numbers = []
    for text in asked:
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
        if found is None:
            raise InputError(
                f"--rows has {text!r}, expected a number from 0, or a range such as "
                "10-12"
            )
        first, last = int(found[1]), int(found[2] or found[1])
        if not first <= last < count:
            raise InputError(
                f"--rows has {text}, expected rows from 0 to {count - 1}, the last of "
                "the file"
            )
        numbers += range(first, last + 1)
    return numbers


def legend(coloured: bool) -> "Text":
    """What the colours or the marks mean."""
    from rich.text import Text

    if not coloured:
        return Text(
            "each run of tokens of one type and weight: [TYPE xWEIGHT|text]; a weight "
            "of 1 is left out"
        )
    parts: list[Text | str | tuple[str, str]] = []
    for name, (dark, light) in zip(NAMES, SHADES, strict=True):
        half = len(name) // 2
        parts += [(name[:half], dark), (name[half:], light), "  "]
    weights = ("weight 0", "dim"), ", ", ("below 1", "italic"), ", ", ("1", "bold")
    return Text.assemble(*parts, " ", *weights, ", ", ("above 1", "bold underline"))


def row_text(row: "ShownRow", coloured: bool) -> "Text":
    """A row as one text, in colours or with marks."""
    from rich.text import Text

    text = Text()
    for (kind, weight), tokens in _runs(row):
        if kind == NAMES.index("padding") and len(tokens) > 1:
            # Of padding, one token and how often.
            shown = f"{tokens[0].text.strip()} ×{len(tokens)}"
            pieces = [(shown, 0)]
        else:
            pieces = [(token.text, token.place % 2) for token in tokens]
        if coloured:
            for piece, shade in pieces:
                text.append(piece, f"{SHADES[kind][shade]} {_strength(weight)}")
        else:
            factor = "" if weight == 1 else f" x{weight:g}"
            text.append(f"[{NAMES[kind]}{factor}|")
            text.append("".join(piece for piece, _ in pieces) + "]")
    return text


def _runs(row: "ShownRow") -> Iterator[tuple[tuple[int, float], list["ShownToken"]]]:
    """Neighbours of one type and weight."""
    alike = itertools.groupby(row.tokens, key=lambda token: (token.type, token.weight))
    return ((key, list(tokens)) for key, tokens in alike)


def _strength(weight: float) -> str:
    if weight == 0:
        return "dim"
    if weight < 1:
        return "italic"
    return "bold" if weight == 1 else "bold underline"


def _heading(row: "ShownRow") -> "Text":
    """Where a row is from, and how many tokens it has of each type."""
    from rich.text import Text

    counts = Counter(token.type for token in row.tokens)
    parts = ", ".join(f"{counts[i]} {n}" for i, n in enumerate(NAMES) if counts[i])
    learned = sum(token.weight != 0 for token in row.tokens)
    text = Text(f"row {row.number}", style="bold")
    line = row.where.rpartition(", ")[2]
    text.append(f", {line}" if line.startswith("line") else "", style="not bold")
    shown = parts if row.typed else "no types, so all are learned"
    rest = f": {len(row.tokens)} tokens ({shown}), {learned} of them learned"
    return text.append(rest, style="not bold")


def _print_tokens(console: "Console", row: "ShownRow") -> None:
    """A table with a line for each token, padding at the end aside."""
    from rich.table import Table
    from rich.text import Text

    table = Table("place", "id", "text", "type", "weight")
    last = max(
        (t.place for t in row.tokens if t.type != NAMES.index("padding")), default=-1
    )
    for token in row.tokens[: last + 1]:
        style = f"{SHADES[token.type][0]} {_strength(token.weight)}"
        table.add_row(
            str(token.place),
            str(token.id),
            Text(repr(token.text)),
            Text(f"{token.type} {NAMES[token.type]}", style=style),
            f"{token.weight:g}",
        )
    console.print(table)
