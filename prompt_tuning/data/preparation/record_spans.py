"""Where the records of a file lie: a line each, or a row of a table."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

MAXIMUM_RECORD = 1 << 26
"""Bytes of the longest record: what one costs must fit in memory."""

_PIECE = 1 << 20
_UTF8_MARK = b"\xef\xbb\xbf"


class RecordSpan(NamedTuple):
    """Where a record lies.

    Attributes:
      start: its first byte.
      size: how many it has; more than `MAXIMUM_RECORD` in one that cannot be used.
      line: its first line, from 1.
    """

    start: int
    size: int
    line: int


class _Line(NamedTuple):
    """A line; of one longer than `MAXIMUM_RECORD`, `content` is the beginning."""

    number: int
    start: int
    end: int
    content: bytes


def spans(
    path: Path, delimiter: bytes | None, taken: Callable[[bytes], None]
) -> Iterator[RecordSpan]:
    """Every record of a file; lines of nothing but white space are no records.

    A quote that is not closed, or not within the longest record, is one line's fault:
    that line is a record, which cannot be read as a row, and what follows are others.

    Args:
      path: the file.
      delimiter: parts the cells of a table that has quotes; None of other files.
      taken: is told all bytes of the file, in order.
    """
    with path.open("rb") as file:
        lines = _Lines(file, taken)
        while line := lines.read():
            if not line.content or line.content.isspace():
                continue
            end = line.end
            if delimiter is not None and leaves_open(line.content, delimiter):
                end = _closed(lines, line, delimiter) or lines.back_to(line)
            yield RecordSpan(line.start, end - line.start, line.number)


def _closed(lines: "_Lines", first: _Line, delimiter: bytes) -> int | None:
    """Where the line ends that closes a quote; None if none does."""
    end = first.end
    while end - first.start <= MAXIMUM_RECORD and (line := lines.read()):
        end = line.end
        if end - first.start > MAXIMUM_RECORD:
            return None
        if not leaves_open(line.content, delimiter, opened=True):
            return end
    return None


def leaves_open(line: bytes, delimiter: bytes, opened: bool = False) -> bool:
    """Whether a quoted cell goes on after a line of a table, as `csv` reads it.

    A quote opens a cell where it is its first character only; within, two stand for
    one. What else follows a closing quote is for the row's reader to refuse.

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


@dataclasses.dataclass
class _Lines:
    """The lines of a file, of which some are read again.

    Attributes:
      file: the file.
      taken: is told every byte once.
      number: of the line that was read last.
      at: where the next one begins.
      told: how many bytes `taken` knows.
    """

    file: BinaryIO
    taken: Callable[[bytes], None]
    number: int = 0
    at: int = 0
    told: int = 0

    def read(self) -> _Line | None:
        """The next line; None at the end."""
        start, content = self.at, self._piece(MAXIMUM_RECORD + 1)
        if not content:
            return None
        if len(content) > MAXIMUM_RECORD:
            last = content
            while last and not last.endswith(b"\n"):
                last = self._piece(_PIECE)
        self.number += 1
        if self.number == 1 and content.startswith(_UTF8_MARK):
            start, content = len(_UTF8_MARK), content[len(_UTF8_MARK) :]
        return _Line(self.number, start, self.at, content)

    def back_to(self, line: _Line) -> int:
        """Goes back to the end of a line; gives it."""
        self.number, self.at = line.number, line.end
        self.file.seek(self.at)
        return self.at

    def _piece(self, size: int) -> bytes:
        piece = self.file.readline(size)
        self.at += len(piece)
        if self.at > self.told:
            self.taken(piece)
            self.told = self.at
        return piece
