"""The input files of a preparation, and the bytes and cells of their records."""

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
    find_spans,
    leaves_quote_open,
)

DELIMITERS = {".csv": ",", ".tsv": "\t"}
SUFFIXES = (".jsonl", ".txt", *DELIMITERS)
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


@dataclasses.dataclass(frozen=True)
class InputFile:
    """A file of records.

    Attributes:
      path: path of the file.
      header: column names of a table; None for other files.
      quotes: whether `"` quotes the cells of a table.
      problem: why the whole file is unusable; None if it may be usable.
    """

    path: Path
    header: tuple[str, ...] | None = None
    quotes: bool = True
    problem: str | None = None

    @property
    def delimiter(self) -> str | None:
        """Delimiter of a table's cells; None for other files."""
        return DELIMITERS.get(self.path.suffix.lower())

    @property
    def quoting_delimiter(self) -> bytes | None:
        """Delimiter of cells that may be quoted; None if no cell may be."""
        return self.delimiter.encode() if self.delimiter and self.quotes else None

    @property
    def is_text(self) -> bool:
        """Whether each line is a completion as it is."""
        return self.path.suffix.lower() == ".txt"


@dataclasses.dataclass(frozen=True)
class FileVersion:
    """Path, size and modification time of a file, by which changes are detected.

    Attributes:
      path: resolved path.
      size: size in bytes.
      modified: modification time in nanoseconds.
    """

    path: str
    size: int
    modified: int


def find_input_files(
    names: Sequence[str], record: RecordFormat, *, skip: bool = False
) -> list[InputFile]:
    """Finds the named files, and the files in named folders in sorted order.

    Args:
      names: paths of files and folders.
      record: format of the records, which sets how tables are read.
      skip: whether an unusable file is returned with its problem instead of raising
        an error.

    Raises:
      InputError: if a file is missing, repeated or of an unknown type; without `skip`,
        also if one is empty, in UTF-16, or a table without column names.
    """
    paths: list[Path] = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            contents = [file for file in sorted(path.rglob("*")) if file.is_file()]
            usable = [file for file in contents if file.suffix.lower() in SUFFIXES]
            if not usable:
                raise InputError(
                    f"{path} contains {len(contents)} files, but none that ends with "
                    f"{', '.join(SUFFIXES)}"
                )
            paths += usable
        else:
            paths.append(path)
    _check_paths(paths)
    return [_open_input(path, record.quotes, skip) for path in paths]


def _check_paths(paths: Sequence[Path]) -> None:
    first_paths: dict[Path, Path] = {}
    for path in paths:
        if not path.is_file():
            raise InputError(f"input {path}: there is no such file or folder")
        if path.suffix.lower() not in SUFFIXES:
            raise InputError(
                f"input {path} ends with {path.suffix!r}, expected "
                f"{', '.join(SUFFIXES)}, which determine how it is read"
            )
        first = first_paths.setdefault(path.resolve(), path)
        if first is not path:
            raise InputError(
                f"input {path} is the file {first}, which is named before it: its "
                "records would be read twice; name it once, directly, by its folder "
                "or by one link"
            )


def _open_input(path: Path, quotes: bool, skip: bool) -> InputFile:
    file = InputFile(path, None, quotes)
    try:
        _check_start(path)
        header = None if file.delimiter is None else _read_header(file)
    except InputError as problem:
        if not skip:
            raise
        return dataclasses.replace(file, problem=str(problem))
    return dataclasses.replace(file, header=header)


def _check_start(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(2)
    if not start:
        raise InputError(f"input {path} is empty, expected at least one record")
    if start in _UTF16_MARKS:
        raise InputError(
            f"input {path} starts with the byte order mark of UTF-16, expected UTF-8: "
            f"convert it, for example with iconv -f UTF-16 -t UTF-8 {path.name}"
        )


def _read_header(file: InputFile) -> tuple[str, ...]:
    for span in find_spans(file.path, file.quoting_delimiter, lambda content: None):
        location = f"{file.path}, line {span.line}"
        with file.path.open("rb") as opened:
            content = read_record(opened.fileno(), span, location)
        names = tuple(parse_row(file, content, location))
        repeated = {name for name in names if names.count(name) > 1}
        if repeated or "" in names:
            raise InputError(
                f"{location}: the columns are {list(names)}, expected a unique name "
                "for each"
            )
        return names
    raise InputError(f"input {file.path} has no line with column names")


def read_record(descriptor: int, span: RecordSpan, location: str) -> bytes:
    """Reads the bytes of a record from an open file.

    Raises:
      InputError: if the record is too long.
    """
    if span.size > MAXIMUM_RECORD:
        raise InputError(
            f"{location}: found a record of {span.size:,} bytes, expected one record "
            f"per line, of at most {MAXIMUM_RECORD:,} bytes "
            f"({MAXIMUM_RECORD >> 20} MiB)"
        )
    return os.pread(descriptor, span.size, span.start)


def parse_row(file: InputFile, content: bytes, location: str) -> list[str]:
    """Parses the cells of one row of a table.

    Raises:
      InputError: if the row is not UTF-8, or is not a row of a table.
    """
    assert file.delimiter is not None
    text = decode_text(content, location)
    quoting = csv.QUOTE_MINIMAL if file.quotes else csv.QUOTE_NONE
    previous_limit = csv.field_size_limit(MAXIMUM_RECORD)
    try:
        rows = csv.reader(
            io.StringIO(text, newline=""),
            delimiter=file.delimiter,
            quoting=quoting,
            strict=True,
        )
        row = next(rows, [])
        has_more = any(rows)
    except csv.Error as error:
        problem = f"not a row of a table: {error}"
        if file.quotes and leaves_quote_open(content, file.delimiter.encode()):
            problem = "a quote is opened and never closed"
        raise InputError(
            f"{location}: {problem}; if quotes are ordinary characters in this file, "
            "add --no_quotes"
        ) from error
    finally:
        csv.field_size_limit(previous_limit)
    if has_more:
        raise InputError(
            f"{location}: found more than one row, expected one: does an unquoted cell "
            "contain a carriage return, or does a carriage return end each row?"
        )
    return row


def decode_text(content: bytes, location: str) -> str:
    """Decodes UTF-8.

    Raises:
      InputError: if the bytes are not UTF-8.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{location}: byte {error.start + 1} of the record is "
            f"0x{content[error.start]:02x}, which is not UTF-8: convert the file, for "
            "example with iconv -f WINDOWS-1252 -t UTF-8"
        ) from error


def file_versions(files: Sequence[InputFile]) -> list[FileVersion]:
    """Returns the current versions of files."""
    stats = [(file.path, file.path.stat()) for file in files]
    return [
        FileVersion(str(path.resolve()), stat.st_size, stat.st_mtime_ns)
        for path, stat in stats
    ]
