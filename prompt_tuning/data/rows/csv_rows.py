"""Parses the rows of tables (`.csv`, `.tsv`), and checks the bytes of text files."""

import csv
import dataclasses
import io
import os
import re
from pathlib import Path

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.utf8_text import decode_text
from prompt_tuning.data.rows import compressed_files, record_spans

DELIMITERS = {".csv": ",", ".tsv": "\t"}
"""Delimiters of tables."""
OTHER_DELIMITERS = (";", "\t", "|")
"""Delimiters of `.csv` whose header has no comma."""

_HEADER = 2**16
"""Number of bytes of a header in which its delimiter is looked for."""

_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def check_encoding(path: Path) -> None:
    """Refuses an empty text file, and one that begins as UTF-16."""
    with compressed_files.open_content(path) as file:
        start = file.read(2)
    if not start:
        raise InputError(f"input {path} is empty, expected at least one record")
    if start in _UTF16_MARKS:
        raise InputError(
            f"input {path} starts with the byte order mark of UTF-16, expected UTF-8: "
            f"convert it, for example with iconv -f UTF-16 -t UTF-8 {path.name}"
        )


def read_record(
    descriptor: int,
    span: record_spans.RecordSpan,
    location: str,
    maximum: int | None = None,
) -> bytes:
    """Reads the bytes of a record from an open file, at most `maximum`."""
    maximum = record_spans.MAXIMUM_RECORD if maximum is None else maximum
    if span.size > maximum:
        raise InputError(
            f"{location}: found a record of {span.size:,} bytes, expected one record "
            f"per line, of at most {maximum:,} bytes ({maximum >> 20} MiB)"
        )
    return os.pread(descriptor, span.size, span.start)


@dataclasses.dataclass(frozen=True)
class Table:
    """How the rows of a table are written.

    Attributes:
      header: unique names of the columns. Some may be empty: pandas writes the numbers
        of rows in such columns, and spreadsheets write commas after the last one.
      delimiter: delimiter of the cells.
      quotes: whether `"` quotes a cell.
      hint: ends the message about a quote that is never closed.
    """

    header: tuple[str, ...]
    delimiter: str
    quotes: bool
    hint: str

    @classmethod
    def open(
        cls, path: Path, quotes: bool, hint: str, name: Path | None = None
    ) -> "Table":
        """Reads the header of a file, whose name for messages may be another."""
        name = path if name is None else name
        table = cls((), _find_delimiter(path, quotes), quotes, hint)
        for span in record_spans.find_spans(path, table.quoting):
            location = f"{name}, line {span.line}"
            with path.open("rb") as opened:
                content = read_record(opened.fileno(), span, location)
            names = tuple(table.cells(content, location))
            named = [name for name in names if name]
            if len(set(named)) < len(named) or not named:
                raise InputError(
                    f"{location}: the columns are {shown(list(names))}, expected a "
                    "unique name for each"
                )
            return dataclasses.replace(table, header=names)
        raise InputError(f"input {name} has no line with column names")

    @property
    def quoting(self) -> bytes | None:
        """Delimiter of cells that may be quoted; None if no cell may be."""
        return self.delimiter.encode() if self.quotes else None

    def row(self, content: bytes, location: str) -> dict[str, str]:
        """Parses a row into its cells by column, without columns that have no name.

        There must be no text after the last column with a name.
        """
        cells, header = self.cells(content, location), self.header
        if len(cells) != len(header):
            raise InputError(
                f"{location}: {len(cells)} cells, expected {len(header)}, one for each "
                f"of the columns {shown(list(header))}"
            )
        row = dict(zip(header, cells, strict=True))
        if row.pop("", "") and not header[-1]:
            raise InputError(
                f"{location}: the last cell is {shown(cells[-1])}, but its column has "
                "no name: name it in the header, or enclose cells that have the "
                "delimiter in quotes"
            )
        return row

    def cells(self, content: bytes, location: str) -> list[str]:
        """Parses the cells of one row."""
        text = decode_text(content, location)
        quoting = csv.QUOTE_MINIMAL if self.quotes else csv.QUOTE_NONE
        previous_limit = csv.field_size_limit(record_spans.MAXIMUM_RECORD)
        try:
            rows = csv.reader(
                io.StringIO(text, newline=""),
                delimiter=self.delimiter,
                quoting=quoting,
                strict=True,
            )
            row = next(rows, [])
            has_more = any(rows)
        except csv.Error as error:
            problem = f"not a row of a table: {error}"
            delimiter = self.quoting
            if delimiter and record_spans.leaves_quote_open(content, delimiter):
                problem = "a quote is opened and never closed"
            raise InputError(f"{location}: {problem}; {self.hint}") from error
        finally:
            csv.field_size_limit(previous_limit)
        if has_more:
            raise InputError(
                f"{location}: found more than one row, expected one: does an unquoted "
                "cell contain a carriage return, or does a carriage return end each "
                "row?"
            )
        return row


def _find_delimiter(path: Path, quotes: bool) -> str:
    """Returns the delimiter of a table, by its suffix and its first row.

    Spreadsheets write `.csv` with semicolons where the comma is the decimal sign, and
    databases write it with tabs.
    """
    delimiter = DELIMITERS[path.suffix.lower()]
    if delimiter != ",":
        return delimiter
    for span in record_spans.find_spans(path, delimiter.encode() if quotes else None):
        with path.open("rb") as opened:
            content = os.pread(opened.fileno(), min(span.size, _HEADER), span.start)
        unquoted = re.sub(rb'"[^"]*"', b"", content) if quotes else content
        found = (x for x in (delimiter, *OTHER_DELIMITERS) if x.encode() in unquoted)
        return next(found, delimiter)
    return delimiter
