"""The files of a preparation, and the bytes and cells of their records."""

import csv
import dataclasses
import io
import os
from collections.abc import Sequence
from pathlib import Path

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.preparation.preparation_settings import RecordFormat
from prompt_tuning.data.preparation.record_spans import (
    MAXIMUM_RECORD,
    RecordSpan,
    leaves_open,
    spans,
)

DELIMITERS = {".csv": ",", ".tsv": "\t"}
SUFFIXES = (".jsonl", ".txt", *DELIMITERS)
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


@dataclasses.dataclass(frozen=True)
class InputFile:
    """A file of records.

    Attributes:
      path: where it is.
      header: the column names of a table; None of other files.
      quotes: whether `"` quotes its cells.
      problem: why nothing in it can be used; None if something may be.
    """

    path: Path
    header: tuple[str, ...] | None = None
    quotes: bool = True
    problem: str | None = None

    @property
    def delimiter(self) -> str | None:
        """What parts the cells of a table; None of other files."""
        return DELIMITERS.get(self.path.suffix.lower())

    @property
    def quoting_delimiter(self) -> bytes | None:
        """What parts its cells, if they may be quoted."""
        return self.delimiter.encode() if self.delimiter and self.quotes else None

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


def input_files(
    names: Sequence[str], record: RecordFormat, *, skip: bool = False
) -> list[InputFile]:
    """The files that are named, and those of folders in the order of their names.

    Args:
      names: of files and folders.
      record: how tables are read.
      skip: whether files in which nothing can be used are there with their problem.

    Raises:
      InputError: if one is missing, named twice or of another kind; without `skip`, if
        one is empty, in UTF-16, or a table without names of its columns.
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
    _check_paths(paths)
    return [_input_file(path, record.quotes, skip) for path in paths]


def _check_paths(paths: Sequence[Path]) -> None:
    known: dict[Path, Path] = {}
    for path in paths:
        if not path.is_file():
            raise InputError(f"input {path}: there is no such file or folder")
        if path.suffix.lower() not in SUFFIXES:
            raise InputError(
                f"input {path} ends with {path.suffix!r}, expected "
                f"{', '.join(SUFFIXES)}, which say how it is read"
            )
        first = known.setdefault(path.resolve(), path)
        if first is not path:
            raise InputError(
                f"input {path} is the file {first}, which is named before it: its "
                "records would be read twice; name it once, by itself, by its folder "
                "or by one link"
            )


def _input_file(path: Path, quotes: bool, skip: bool) -> InputFile:
    plain = InputFile(path, None, quotes)
    try:
        _check_start(path)
        header = None if plain.delimiter is None else _header(plain)
    except InputError as problem:
        if not skip:
            raise
        return dataclasses.replace(plain, problem=str(problem))
    return dataclasses.replace(plain, header=header)


def _check_start(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(2)
    if not start:
        raise InputError(f"input {path} is empty, expected at least one record")
    if start in _UTF16_MARKS:
        raise InputError(
            f"input {path} begins as UTF-16 does, expected UTF-8: convert it, as with "
            f"iconv -f UTF-16 -t UTF-8 {path.name}"
        )


def _header(file: InputFile) -> tuple[str, ...]:
    for span in spans(file.path, file.quoting_delimiter, lambda content: None):
        place = f"{file.path}, line {span.line}"
        with file.path.open("rb") as opened:
            content = record_bytes(opened.fileno(), span, place)
        names = tuple(cells(file, content, place))
        repeated = {name for name in names if names.count(name) > 1}
        if repeated or "" in names:
            raise InputError(
                f"{place}: the columns are {list(names)}, expected a name of its own "
                "for each"
            )
        return names
    raise InputError(f"input {file.path} has no line with the names of its columns")


def record_bytes(descriptor: int, span: RecordSpan, place: str) -> bytes:
    """What a record is, read from an open file.

    Raises:
      InputError: if it is too long.
    """
    if span.size > MAXIMUM_RECORD:
        raise InputError(
            f"{place}: a record of {span.size:,} bytes, expected one to a line, of at "
            f"most {MAXIMUM_RECORD:,} ({MAXIMUM_RECORD >> 20} MiB)"
        )
    return os.pread(descriptor, span.size, span.start)


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
        said = f"not a row of a table: {error}"
        if file.quotes and leaves_open(content, file.delimiter.encode()):
            said = "a quote is opened and never closed"
        raise InputError(
            f"{place}: {said}; if quotes are characters of the "
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
