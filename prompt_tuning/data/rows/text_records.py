"""The records of text files: lines of jsonl, rows of tables, objects of a JSON list."""

from collections.abc import Callable, Iterator
from pathlib import Path

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.typed_json import NAMES, read_json
from prompt_tuning.data.rows.jsonl import MAXIMUM_LINE, JsonLine, read_lines
from prompt_tuning.data.rows.parquet_files import read_parquet
from prompt_tuning.data.rows.record_spans import find_spans
from prompt_tuning.data.rows.table_cells import (
    DELIMITERS,
    check_encoding,
    parse_row,
    read_header,
    read_record,
)

QUOTES_HINT = (
    'write a quote within a cell as two quotes ("") and enclose the cell in quotes'
)


def read_records(path: Path) -> Iterator[JsonLine]:
    """Yields the records of a text file, whose suffix determines its kind.

    A byte order mark at the start is skipped.

    Raises:
      InputError: at a record that is not an object of its kind.
    """
    suffix = path.suffix.lower()
    if suffix != ".parquet":
        check_encoding(path)
    yield from READERS[suffix](path)


def _read_table(path: Path) -> Iterator[JsonLine]:
    """Yields the rows of a table, whose first row names the keys."""
    delimiter = DELIMITERS[path.suffix.lower()]
    header = read_header(path, delimiter, True, QUOTES_HINT)
    spans = find_spans(path, delimiter.encode(), lambda content: None)
    with path.open("rb") as opened:
        for number, span in enumerate(spans):
            if number == 0:
                continue
            location = f"{path}, line {span.line}"
            content = read_record(opened.fileno(), span, location, MAXIMUM_LINE)
            row = parse_row(content, header, delimiter, True, location, QUOTES_HINT)
            yield JsonLine(path, span.line, row, typed=False)


def _read_list(path: Path) -> Iterator[JsonLine]:
    """Yields the objects of a file that is one JSON list."""
    content = read_json(path)
    if not isinstance(content, list):
        raise InputError(
            f"{path} contains {_kind(content)}, expected a list of objects; a file "
            "with one object per line must end in .jsonl"
        )
    for number, item in enumerate(content, start=1):
        if not isinstance(item, dict):
            raise InputError(
                f"{path}, item {number}: found {_kind(item)}, expected an object whose "
                "values are text"
            )
        yield JsonLine(path, number, item, unit="item")


def _kind(value: object) -> str:
    return NAMES.get(type(value), type(value).__name__)


READERS: dict[str, Callable[[Path], Iterator[JsonLine]]] = {
    ".jsonl": read_lines,
    ".json": _read_list,
    ".csv": _read_table,
    ".tsv": _read_table,
    ".parquet": read_parquet,
}
"""Readers of files of text, by the files' suffix."""
