"""The files of a preparation, and an index of where each of their records lies.

The index is a file of its own, so that any record is read without those before it and
memory does not grow with the input.
"""

import csv
import dataclasses
import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from jaxtyping import Int64

from prompt_tuning.data.preparation.settings import RecordFormat
from prompt_tuning.errors import InputError

DELIMITERS = {".csv": ",", ".tsv": "\t"}
SUFFIXES = (".jsonl", ".txt", *DELIMITERS)
MAXIMUM_RECORD = 1 << 26
"""Bytes of the longest record: what one costs must fit in memory."""

_FIELDS = 4
_BUFFERED = 1 << 14
_UTF8_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")

Advance = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class InputFile:
    """A file of records.

    Attributes:
      path: where it is.
      header: the column names of a table; None of other files.
      quotes: whether `"` quotes its cells.
    """

    path: Path
    header: tuple[str, ...] | None = None
    quotes: bool = True

    @property
    def delimiter(self) -> str | None:
        """What parts the cells of a table; None of other files."""
        return DELIMITERS.get(self.path.suffix.lower())

    @property
    def is_text(self) -> bool:
        """Whether each line is a completion as it stands."""
        return self.path.suffix.lower() == ".txt"


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a file was when it was read, for the same bytes to be read again.

    Attributes:
      path: where it was.
      size: its bytes.
      modified: when it was last changed, in nanoseconds.
    """

    path: str
    size: int
    modified: int


def input_files(names: Sequence[str], record: RecordFormat) -> list[InputFile]:
    """The files that are named, and those of folders in the order of their names.

    Raises:
      InputError: if one is missing, empty, of another kind, or a table without the
        columns that are asked for.
    """
    paths: list[Path] = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            found = [file for file in sorted(path.rglob("*")) if file.is_file()]
            kept = [file for file in found if file.suffix.lower() in SUFFIXES]
            if not kept:
                raise InputError(
                    f"{path} holds {len(found)} files and none that ends with "
                    f"{', '.join(SUFFIXES)}"
                )
            paths += kept
        else:
            paths.append(path)
    return [_input_file(path, record.quotes) for path in paths]


def _input_file(path: Path, quotes: bool) -> InputFile:
    if not path.is_file():
        raise InputError(f"input {path}: there is no such file or folder")
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(
            f"input {path} ends with {path.suffix!r}, expected {', '.join(SUFFIXES)}, "
            "which say how it is read"
        )
    with path.open("rb") as file:
        start = file.read(2)
    if not start:
        raise InputError(f"input {path} is empty, expected at least one record")
    if start in _UTF16_MARKS:
        raise InputError(
            f"input {path} begins as UTF-16 does, expected UTF-8: convert it, as with "
            f"iconv -f UTF-16 -t UTF-8 {path.name}"
        )
    plain = InputFile(path, None, quotes)
    if plain.delimiter is None:
        return plain
    return dataclasses.replace(plain, header=_header(plain))


def _header(file: InputFile) -> tuple[str, ...]:
    for _, content, number in _records(file, lambda bytes: None):
        names = tuple(cells(file, content, f"{file.path}, line {number}"))
        repeated = {name for name in names if names.count(name) > 1}
        if repeated or "" in names:
            raise InputError(
                f"{file.path}, line {number}: the columns are {list(names)}, expected "
                "a name of its own for each"
            )
        return names
    raise InputError(f"input {file.path} has no line with the names of its columns")


def cells(file: InputFile, content: bytes, place: str) -> list[str]:
    """The cells of one row of a table.

    Raises:
      InputError: if it is not UTF-8, or cannot be read as a row.
    """
    assert file.delimiter is not None
    text = decoded(content, place)
    quoting = csv.QUOTE_MINIMAL if file.quotes else csv.QUOTE_NONE
    previous = csv.field_size_limit(MAXIMUM_RECORD)
    try:
        rows = csv.reader(
            io.StringIO(text, newline=""),
            delimiter=file.delimiter,
            quoting=quoting,
            strict=True,
        )
        row = next(rows, [])
        further = any(rows)
    except csv.Error as error:
        raise InputError(
            f"{place}: not a row of a table: {error}; if quotes are characters of the "
            "text in this file, say --no_quotes"
        ) from error
    finally:
        csv.field_size_limit(previous)
    if further:
        raise InputError(
            f"{place}: found more than one row, expected one: is a carriage return in "
            "a cell that is not quoted, or does one end each row?"
        )
    return row


def decoded(content: bytes, place: str) -> str:
    """Bytes as text.

    Raises:
      InputError: if they are not UTF-8.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{place}: byte {error.start + 1} of the record is "
            f"0x{content[error.start]:02x}, which is not UTF-8: convert the file, as "
            "with iconv -f WINDOWS-1252 -t UTF-8"
        ) from error


def origins(files: Sequence[InputFile]) -> list[Origin]:
    """What the files are now."""
    found = [(file.path, file.path.stat()) for file in files]
    return [
        Origin(str(path.resolve()), stat.st_size, stat.st_mtime_ns)
        for path, stat in found
    ]


def write_index(files: Sequence[InputFile], path: Path, advance: Advance) -> list[str]:
    """Writes where every record lies; gives the SHA-256 of each file.

    The index has four int64 to a record: the file, the first byte, the number of bytes,
    the line from 1. Lines of nothing but white space are no records.

    Raises:
      InputError: if a file has no record, or one is too long.
    """
    digests = []
    with path.open("wb") as index:
        for number, file in enumerate(files):
            digest = hashlib.sha256()
            before = index.tell()
            _index_file(file, number, index, digest.update, advance)
            if index.tell() == before:
                what = "row below its header" if file.header else "line with text"
                raise InputError(f"input {file.path} has no {what}")
            digests.append(digest.hexdigest())
    return digests


def _index_file(
    file: InputFile,
    number: int,
    index: BinaryIO,
    update: Callable[[bytes], None],
    advance: Advance,
) -> None:
    rows: list[tuple[int, int, int, int]] = []
    read = 0

    def flush() -> None:
        nonlocal read
        index.write(np.array(rows, np.int64).tobytes())
        rows.clear()
        advance(read)
        read = 0

    def taken(content: bytes) -> None:
        nonlocal read
        update(content)
        read += len(content)

    skip = 0 if file.header is None else 1
    for place, (start, content, line) in enumerate(_records(file, taken)):
        if place < skip:
            continue
        rows.append((number, start, len(content), line))
        if len(rows) == _BUFFERED:
            flush()
    flush()


def _records(
    file: InputFile, taken: Callable[[bytes], None]
) -> Iterator[tuple[int, bytes, int]]:
    """First byte, content and line of each record; every line goes to `taken` too."""
    delimiter = file.delimiter.encode() if file.delimiter and file.quotes else None
    start, begun, size = 0, 1, 0
    held: list[bytes] = []
    opened = False
    with file.path.open("rb") as lines:
        at = 0
        for number, line in enumerate(_lines(lines, file.path), start=1):
            taken(line)
            content = line
            if number == 1 and line.startswith(_UTF8_MARK):
                at, content = len(_UTF8_MARK), line[len(_UTF8_MARK) :]
            if not held:
                start, begun, size = at, number, 0
            at += len(content)
            size += len(content)
            held.append(content)
            opened = delimiter is not None and _leaves_open(content, delimiter, opened)
            if opened:
                _check_size(size, file.path, begun, "a quote is opened and not closed")
                continue
            record = b"".join(held)
            if not record.isspace() and record:
                yield start, record, begun
            held.clear()
    if opened:
        raise InputError(
            f"{file.path}, line {begun}: a quote is opened and never closed; if quotes "
            "are characters of the text in this file, say --no_quotes"
        )


def _leaves_open(line: bytes, delimiter: bytes, opened: bool) -> bool:
    """Whether a quoted cell goes on after a line of a table, as `csv` reads it.

    A quote opens a cell where it is its first character only; within, two stand for
    one. What else follows a closing quote is for `cells` to refuse.

    Args:
      line: one line, with its end.
      delimiter: what parts its cells.
      opened: whether it begins within a quoted cell.
    """
    at = 0
    if not opened and line.startswith(b'"'):
        at, opened = 1, True
    while True:
        if opened:
            at = line.find(b'"', at)
            if at < 0:
                return True
            opened = line.startswith(b'"', at + 1)
            at += 2 if opened else 1
        else:
            at = line.find(delimiter + b'"', at)
            if at < 0:
                return False
            at, opened = at + 2, True


def _lines(lines: BinaryIO, path: Path) -> Iterator[bytes]:
    number = 0
    while line := lines.readline(MAXIMUM_RECORD + 1):
        number += 1
        _check_size(len(line), path, number, "a line is longer")
        yield line


def _check_size(size: int, path: Path, line: int, what: str) -> None:
    if size > MAXIMUM_RECORD:
        raise InputError(
            f"{path}, line {line}: {what} within {MAXIMUM_RECORD >> 20} MiB, expected "
            "one record to a line"
        )


class RecordIndex:
    """The index of a preparation, read a block at a time.

    Attributes:
      path: the file that `write_index` wrote.
    """

    def __init__(self, path: Path):
        self.path = path

    def __len__(self) -> int:
        return self.path.stat().st_size // (8 * _FIELDS)

    def read(self, records: Int64[np.ndarray, "n"]) -> Int64[np.ndarray, "n 4"]:
        """File, first byte, number of bytes and line of some records."""
        if not len(records):
            return np.zeros((0, _FIELDS), np.int64)
        table = np.memmap(self.path, np.int64, "r").reshape(-1, _FIELDS)
        return np.array(table[records])
