"""Inputs without targets: lines of files or of standard input, and texts."""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.utf8_text import decode_text
from prompt_tuning.data.rows.compressed_files import content_suffix, open_content
from prompt_tuning.data.rows.data_files import list_files, text_suffix
from prompt_tuning.data.rows.jsonl import JsonLine, numbered_lines, parse_lines
from prompt_tuning.data.rows.record_spans import BYTE_ORDER_MARK
from prompt_tuning.data.rows.text_records import read_records

TEXT_SUFFIX = ".txt"
STANDARD_INPUT = "-"


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
) -> list[JsonLine]:
    """Reads the inputs that arguments name, in order.

    An argument is a file of records (see `text_records`) or a glob of such files, a
    text file with an input on each line, `-` for standard input as jsonl or text, or
    else an input itself. Plain texts get the `key`. Empty lines are skipped.
    """
    lines: list[JsonLine] = []
    texts: list[str] = []
    for argument in arguments:
        if not is_input_file(argument):
            texts.append(argument)
            lines.append(JsonLine(Path("texts"), len(texts), {key: argument}))
            continue
        before = len(lines)
        lines.extend(_read_file(argument, key, read_standard_input))
        if len(lines) == before:
            raise InputError(f"{_name(argument)} has no line, expected at least one")
    return lines


def lines_of(inputs: Sequence[str | Mapping[str, Any]], key: str) -> list[JsonLine]:
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
        lines.append(JsonLine(Path("inputs"), number, content))
    return lines


def _read_file(
    argument: str, key: str, read_standard_input: Callable[[], bytes]
) -> Iterator[JsonLine]:
    path = _name(argument)
    if argument == STANDARD_INPUT:
        content = read_standard_input()
        stream = io.BytesIO(content)
        if content.removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"{"):
            yield from parse_lines(stream, path)
        else:
            yield from _text_lines(stream, path, key)
        return
    for file in list_files(argument):
        if not _is_plain(file.name):
            yield from read_records(file)
            continue
        with open_content(file) as stream:
            yield from _text_lines(stream, file, key)


def _is_plain(name: str) -> bool:
    return content_suffix(Path(name)) == TEXT_SUFFIX


def _name(argument: str) -> Path:
    return Path("standard input" if argument == STANDARD_INPUT else argument)


def _text_lines(stream: io.BufferedIOBase, path: Path, key: str) -> Iterator[JsonLine]:
    for number, location, line in numbered_lines(stream, path):
        content = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        text = decode_text(content, location).rstrip("\r\n")
        if text.strip():
            yield JsonLine(path, number, {key: text})
