"""The records of text files: lines of jsonl, rows of tables, objects of a JSON list.

`read_inputs` also reads inputs without targets, from files, standard input or texts.
"""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prompt_tuning.core import typed_json, utf8_text
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.data.rows import compressed_files, csv_rows, jsonl
from prompt_tuning.data.rows.data_files import list_files, text_suffix
from prompt_tuning.data.rows.parquet_files import read_parquet
from prompt_tuning.data.rows.record_spans import BYTE_ORDER_MARK, find_spans

TEXT_SUFFIX = ".txt"
STANDARD_INPUT = "-"
QUOTES_HINT = (
    'write a quote within a cell as two quotes ("") and enclose the cell in quotes'
)


def read_records(path: Path, quotes: bool = True) -> Iterator[jsonl.JsonLine]:
    """Yields the records of a text file; its suffix tells the kind.

    A byte order mark at the start is skipped.
    """
    suffix = compressed_files.content_suffix(path)
    if suffix != ".parquet":
        csv_rows.check_encoding(path)
    if suffix in csv_rows.DELIMITERS:
        yield from _read_table(path, quotes)
    else:
        yield from READERS[suffix](path)


def _read_table(path: Path, quotes: bool) -> Iterator[jsonl.JsonLine]:
    with compressed_files.plain_file(path) as plain:
        table = csv_rows.Table.open(plain, quotes, QUOTES_HINT, path)
        spans = find_spans(plain, table.quoting)
        with plain.open("rb") as opened:
            for number, span in enumerate(spans):
                if number == 0:
                    continue
                location = f"{path}, line {span.line}"
                content = csv_rows.read_record(
                    opened.fileno(), span, location, jsonl.MAXIMUM_LINE
                )
                row = table.row(content, location)
                yield jsonl.JsonLine(path, span.line, row, typed=False)


def _read_list(path: Path) -> Iterator[jsonl.JsonLine]:
    """Yields the objects of a file with one JSON list, or one object of columns.

    Some programs give the name `.json` to files with an object in each line.
    """
    with compressed_files.open_content(path) as stream:
        if _has_objects_in_lines(stream, path):
            yield from jsonl.read_lines(path)
            return
    with compressed_files.open_content(path) as stream:
        text = stream.read(typed_json.MAXIMUM_BYTES + 1)
    content = typed_json.parse_json(text, str(path))
    if isinstance(content, dict):
        content = _rows_of_columns(path, content)
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
        yield jsonl.JsonLine(path, number, item, unit="item")


def _has_objects_in_lines(stream: io.BufferedIOBase, path: Path) -> bool:
    """Returns whether the first line is an object, and another one follows it."""
    first = stream.readline(jsonl.MAXIMUM_LINE + 1).strip()
    second = stream.readline(jsonl.MAXIMUM_LINE + 1).lstrip()
    if not first.endswith(b"}") or not second.startswith(b"{"):
        return False
    try:
        return isinstance(typed_json.parse_json(first, str(path)), dict)
    except InputError:
        return False


def _rows_of_columns(path: Path, columns: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of an object of columns of equal length.

    A column is a list, or as pandas writes it an object with the numbers of the rows.
    """
    values = list(columns.values())
    names = [x.keys() for x in values if isinstance(x, dict)]
    if len(names) == len(values) and all(x == names[0] for x in names):
        values = [list(x.values()) for x in values]
    lengths = {len(x) if isinstance(x, list) else None for x in values}
    if len(lengths) != 1 or None in lengths:
        raise InputError(
            f"{path} contains an object with the keys {shown(list(columns))}, expected "
            "a list of objects, or an object whose values are lists of one length, the "
            "columns; a file with one object per line must end in .jsonl"
        )
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]


def _kind(value: object) -> str:
    return typed_json.NAMES.get(type(value), type(value).__name__)


READERS: dict[str, Callable[[Path], Iterator[jsonl.JsonLine]]] = {
    ".jsonl": jsonl.read_lines,
    ".json": _read_list,
    ".parquet": read_parquet,
}
"""Readers of files of text that are no tables, by the suffix of their content."""


def is_input_file(argument: str) -> bool:
    """Tests whether an argument names a file, or standard input; else it is text."""
    if argument == STANDARD_INPUT:
        return True
    return text_suffix(Path(argument)) is not None or _is_plain(argument)


def has_plain_texts(arguments: Sequence[str]) -> bool:
    """Tests whether some inputs are texts, rather than records with keys."""
    return any(
        not is_input_file(argument) or argument == STANDARD_INPUT or _is_plain(argument)
        for argument in arguments
    )


def read_inputs(
    arguments: Sequence[str], key: str, read_standard_input: Callable[[], bytes]
) -> list[jsonl.JsonLine]:
    """Reads the inputs that arguments name, in order.

    An argument is a file of records (see `text_records`) or a glob of such files, a
    text file with an input on each line, `-` for standard input as jsonl or text, or
    else an input itself. Plain texts get the `key`. Empty lines are skipped.
    """
    lines: list[jsonl.JsonLine] = []
    texts: list[str] = []
    for argument in arguments:
        if not is_input_file(argument):
            texts.append(argument)
            lines.append(jsonl.JsonLine(Path("texts"), len(texts), {key: argument}))
            continue
        before = len(lines)
        lines.extend(_read_file(argument, key, read_standard_input))
        if len(lines) == before:
            raise InputError(f"{_name(argument)} has no line, expected at least one")
    return lines


def lines_of(
    inputs: Sequence[str | Mapping[str, Any]], key: str
) -> list[jsonl.JsonLine]:
    """Returns inputs that Python passes, texts or mappings, as lines."""
    lines = []
    for number, item in enumerate(inputs, start=1):
        if isinstance(item, str):
            content = {key: item}
        elif isinstance(item, Mapping):
            content = {str(name): value for name, value in item.items()}
        else:
            raise InputError(
                f"input {number} is {shown(item)}, expected a text or a mapping"
            )
        lines.append(jsonl.JsonLine(Path("inputs"), number, content))
    return lines


def _read_file(
    argument: str, key: str, read_standard_input: Callable[[], bytes]
) -> Iterator[jsonl.JsonLine]:
    path = _name(argument)
    if argument == STANDARD_INPUT:
        content = read_standard_input()
        stream = io.BytesIO(content)
        if content.removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"{"):
            yield from jsonl.parse_lines(stream, path)
        else:
            yield from _text_lines(stream, path, key)
        return
    for file in list_files(argument):
        if not _is_plain(file.name):
            yield from read_records(file)
            continue
        with compressed_files.open_content(file) as stream:
            yield from _text_lines(stream, file, key)


def _is_plain(name: str) -> bool:
    return compressed_files.content_suffix(Path(name)) == TEXT_SUFFIX


def _name(argument: str) -> Path:
    return Path("standard input" if argument == STANDARD_INPUT else argument)


def _text_lines(
    stream: io.BufferedIOBase, path: Path, key: str
) -> Iterator[jsonl.JsonLine]:
    for number, location, line in jsonl.numbered_lines(stream, path):
        content = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        text = utf8_text.decode_text(content, location).rstrip("\r\n")
        if text.strip():
            yield jsonl.JsonLine(path, number, {key: text})
