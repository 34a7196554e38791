"""An index of the positions of all records of a preparation.

The index is a file, so that any record can be read without those before it and memory
does not grow with the input.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from jaxtyping import Int64

from prompt_tuning.core.atomic_files import sync_path
from prompt_tuning.core.errors import InputError
from prompt_tuning.data.preparation.input_files import InputFile
from prompt_tuning.data.rows import compressed_files, text_records
from prompt_tuning.data.rows.record_spans import find_spans, ignore

_FIELDS = 4
_BUFFERED_RECORDS = 1 << 14
_READ_SIZE = 1 << 20

Advance = Callable[[int], None]


class InputSummary(NamedTuple):
    """SHA-256 of the indexed files, and why files without a record were skipped."""

    digests: list[str]
    problems: list[str]


def write_index(
    files: Sequence[InputFile], path: Path, advance: Advance, *, skip: bool = False
) -> InputSummary:
    """Writes the positions of all records.

    The index has four int64 per record: the number of the file, the first byte, the
    number of bytes, and the line counted from 1. Blank lines are not records.

    Args:
      files: the input files.
      path: path of the index.
      advance: receives the number of bytes as they are read.
      skip: whether files without a record are skipped, if any file has one.
    """
    digests: list[str] = []
    problems: list[str] = []
    with path.open("wb") as index:
        for number, file in enumerate(files):
            digest = hashlib.sha256()
            before = index.tell()
            if file.lines is not None:
                file = _convert(file, digest.update, advance)
                _index_file(file, number, index, ignore, ignore)
            else:
                _index_file(file, number, index, digest.update, advance)
            digests.append(digest.hexdigest())
            if index.tell() == before:
                problems.append(file.problem or _no_record(file))
                if not skip:
                    raise InputError(problems[0])
        if not index.tell():
            raise InputError(f"no input has a record: {problems[0]}")
    return InputSummary(digests, problems)


def _convert(
    file: InputFile, update: Callable[[bytes], None], advance: Advance
) -> InputFile:
    """Converts a file to lines and reads it for its checksum; notes its problem."""
    assert file.lines is not None
    with file.path.open("rb") as opened:
        while content := opened.read(_READ_SIZE):
            update(content)
            advance(len(content))
    problem = file.problem
    try:
        if problem is None and file.has_lines:
            compressed_files.write_content(file.path, file.lines)
        elif problem is None:
            _write_lines(file.path, file.lines, file.quotes)
    except InputError as error:
        problem = str(error)
    if problem is not None:
        file.lines.write_bytes(b"")
    # It must outlast a power cut that the index outlasts.
    sync_path(file.lines)
    return dataclasses.replace(file, problem=problem)


def _write_lines(source: Path, target: Path, quotes: bool = True) -> None:
    """Writes the records of a JSON list, a parquet file or a table as lines of JSON.

    `quotes` tells whether `"` quotes the cells of a table.
    """
    with target.open("wb") as file:
        for record in text_records.read_records(source, quotes):
            text = json.dumps(_to_json(record.content), ensure_ascii=False)
            # Half a surrogate pair is refused with its record.
            file.write(text.encode("utf-8", "surrogatepass") + b"\n")


def _to_json(value: Any) -> Any:
    """Converts what parquet has and JSON lacks: dates to text, infinities to null."""
    if isinstance(value, dict):
        return {str(name): _to_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value)


def _no_record(file: InputFile) -> str:
    missing = "line with text" if file.has_lines or file.lines is None else "record"
    if file.table is not None:
        missing = "row below its header"
    return f"input {file.path} has no {missing}"


def _index_file(
    file: InputFile,
    number: int,
    index: BinaryIO,
    update: Callable[[bytes], object],
    advance: Callable[[int], object],
) -> None:
    rows: list[tuple[int, int, int, int]] = []
    bytes_read = 0

    def flush() -> None:
        nonlocal bytes_read
        index.write(np.array(rows, np.int64).tobytes())
        rows.clear()
        advance(bytes_read)
        bytes_read = 0

    def consume(content: bytes) -> None:
        nonlocal bytes_read
        update(content)
        bytes_read += len(content)

    header_rows = 0 if file.table is None else 1
    quoting = None if file.table is None else file.table.quoting
    spans = find_spans(file.contents, quoting, consume)
    for position, span in enumerate(spans):
        # An unusable file is still read to its end, for its checksum.
        if position < header_rows or file.problem is not None:
            continue
        rows.append((number, span.start, span.size, span.line))
        if len(rows) == _BUFFERED_RECORDS:
            flush()
    flush()


class RecordIndex:
    """The index that `write_index` wrote to a file, read one block at a time."""

    def __init__(self, path: Path):
        self.path = path

    def __len__(self) -> int:
        return self.path.stat().st_size // (8 * _FIELDS)

    def read(self, records: Int64[np.ndarray, "n"]) -> Int64[np.ndarray, "n 4"]:
        """Returns file, first byte, number of bytes and line of the given records."""
        if not len(records):
            return np.zeros((0, _FIELDS), np.int64)
        table = np.memmap(self.path, np.int64, "r").reshape(-1, _FIELDS)
        return np.array(table[records])
