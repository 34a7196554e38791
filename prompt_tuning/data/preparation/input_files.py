"""The input files of a preparation."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.data.preparation.preparation_settings import RecordFormat
from prompt_tuning.data.rows.table_cells import (
    DELIMITERS,
    check_encoding,
    read_header,
)

QUOTES_HINT = "if quotes are ordinary characters in this file, add --no_quotes"
UNITS = {".json": "item", ".parquet": "row"}
"""What the records are called of files that are converted to lines, by suffix."""
SUFFIXES = (".jsonl", ".txt", *DELIMITERS, *UNITS)


@dataclasses.dataclass(frozen=True)
class InputFile:
    """A file of records.

    Attributes:
      path: path of the file.
      header: column names of a table; None for other files.
      quotes: whether `"` quotes the cells of a table.
      problem: why the whole file is unusable; None if it may be usable.
      lines: lines of JSON that a list or a parquet file is converted to; None for files
        that are read as they are.
    """

    path: Path
    header: tuple[str, ...] | None = None
    quotes: bool = True
    problem: str | None = None
    lines: Path | None = None

    @property
    def contents(self) -> Path:
        """File that the records are read from."""
        return self.path if self.lines is None else self.lines

    def location(self, line: int) -> str:
        """Names a record, which is on a line of `contents` counted from 1."""
        suffix = self.path.suffix.lower()
        # Rows of parquet files are counted from 0.
        number = line - (suffix == ".parquet")
        return f"{self.path}, {UNITS.get(suffix, 'line')} {number}"

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
                f"input {path} ends with {shown(path.suffix)}, expected "
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
        if path.suffix.lower() != ".parquet":
            check_encoding(path)
        header = None
        if file.delimiter is not None:
            header = read_header(path, file.delimiter, quotes, QUOTES_HINT)
    except InputError as problem:
        if not skip:
            raise
        return dataclasses.replace(file, problem=str(problem))
    return dataclasses.replace(file, header=header)


def place_lines(files: Sequence[InputFile], folder: Path) -> list[InputFile]:
    """Names the lines in a folder that lists and parquet files are converted to."""
    return [
        dataclasses.replace(file, lines=folder / f"input_{number}.jsonl")
        if file.path.suffix.lower() in UNITS
        else file
        for number, file in enumerate(files)
    ]


def file_versions(files: Sequence[InputFile]) -> list[FileVersion]:
    """Returns the current versions of files."""
    stats = [(file.path, file.path.stat()) for file in files]
    return [
        FileVersion(str(path.resolve()), stat.st_size, stat.st_mtime_ns)
        for path, stat in stats
    ]
