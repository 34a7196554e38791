"""Finds the byte spans of a file's records: its lines, or the rows of a table."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

MAXIMUM_RECORD = 1 << 26
"""Maximum size of a record in bytes, which bounds the memory that one needs."""

_READ_SIZE = 1 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class RecordSpan(NamedTuple):
    """Position of a record in its file.

    Attributes:
      start: offset of the first byte.
      size: number of bytes; a record above `MAXIMUM_RECORD` cannot be used.
      line: number of the first line, counted from 1.
    """

    start: int
    size: int
    line: int


class _Line(NamedTuple):
    """A line; `content` is cut off after `MAXIMUM_RECORD + 1` bytes."""

    number: int
    start: int
    end: int
    content: bytes


def ignore(content: object) -> None:
    """Ignores bytes that nothing counts."""


def find_spans(
    path: Path, delimiter: bytes | None, consume: Callable[[bytes], object] = ignore
) -> Iterator[RecordSpan]:
    """Yields the span of every record of a file; blank lines are not records.

    If a quote is never closed, or not within `MAXIMUM_RECORD` bytes, only its line is
    affected: the line is yielded as a record, which fails to parse as a row, and the
    lines after it are separate records.

    Args:
      path: path of the file.
      delimiter: delimiter of a table's cells if they may be quoted; else None.
      consume: receives all bytes of the file in order, e.g. for a checksum.
    """
    with path.open("rb") as file:
        lines = _LineReader(file, consume)
        while line := lines.read():
            if not line.content or line.content.isspace():
                continue
            end = line.end
            if delimiter is not None and leaves_quote_open(line.content, delimiter):
                end = _quoted_end(lines, line, delimiter) or lines.back_to(line)
            yield RecordSpan(line.start, end - line.start, line.number)


def _quoted_end(lines: "_LineReader", first: _Line, delimiter: bytes) -> int | None:
    """Returns the end of the line that closes an open quote, or None."""
    end = first.end
    while end - first.start <= MAXIMUM_RECORD and (line := lines.read()):
        end = line.end
        if end - first.start > MAXIMUM_RECORD:
            return None
        if not leaves_quote_open(line.content, delimiter, opened=True):
            return end
    return None


def leaves_quote_open(line: bytes, delimiter: bytes, opened: bool = False) -> bool:
    """Whether a quoted cell continues after a line of a table, as `csv` parses it.

    A quote opens a cell only as its first character; inside, two quotes stand for one.
    Invalid text after a closing quote is left to the row's parser.
    """
    at = 0
    if not opened and line.startswith(b'"'):
        at, opened = 1, True
    while True:
        if opened:
            at = line.find(b'"', at)
            if at < 0:
                return True
            # A doubled quote stays inside the cell; a single one closes it.
            opened = line.startswith(b'"', at + 1)
            at += 2 if opened else 1
        else:
            at = line.find(delimiter + b'"', at)
            if at < 0:
                return False
            at, opened = at + 2, True


@dataclasses.dataclass
class _LineReader:
    """Reads the lines of a file and can go back.

    `consume` receives every byte once, even if it is read again: `consumed` counts
    them, and `at` is the offset of the next line.
    """

    file: BinaryIO
    consume: Callable[[bytes], object]
    number: int = 0
    at: int = 0
    consumed: int = 0

    def read(self) -> _Line | None:
        start, content = self.at, self._read_part(MAXIMUM_RECORD + 1)
        if not content:
            return None
        if len(content) > MAXIMUM_RECORD:
            last = content
            while last and not last.endswith(b"\n"):
                last = self._read_part(_READ_SIZE)
        self.number += 1
        if self.number == 1 and content.startswith(BYTE_ORDER_MARK):
            start, content = len(BYTE_ORDER_MARK), content[len(BYTE_ORDER_MARK) :]
        return _Line(self.number, start, self.at, content)

    def back_to(self, line: _Line) -> int:
        self.number, self.at = line.number, line.end
        self.file.seek(self.at)
        return self.at

    def _read_part(self, size: int) -> bytes:
        content = self.file.readline(size)
        self.at += len(content)
        if self.at > self.consumed:
            self.consume(content)
            self.consumed = self.at
        return content
