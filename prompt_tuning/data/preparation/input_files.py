"""The input files of a preparation."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.data.preparation.preparation_settings import RecordFormat
from prompt_tuning.data.rows import csv_rows
from prompt_tuning.data.rows.compressed_files import (
    COMPRESSIONS,
    compression_of,
    content_suffix,
)

QUOTES_HINT = "if quotes are ordinary characters in this file, add --no_quotes"
UNITS = {".json": "item", ".parquet": "row"}
"""What the records are called of files that are converted to lines, by suffix."""
LINES = (".jsonl", ".txt")
SUFFIXES = (*LINES, *csv_rows.DELIMITERS, *UNITS)
EXPECTED = f"{', '.join(SUFFIXES)} (perhaps compressed: {', '.join(COMPRESSIONS)})"


@dataclasses.dataclass(frozen=True)
class InputFile:
    """A file of records.

    Attributes:
      path: path of the file.
      table: how the rows of a table are written; None for other files, and for a
        compressed table, because its lines are JSON.
      quotes: whether `"` quotes the cells of a table.
      problem: why the whole file is unusable; None if it may be usable.
      lines: lines that a list, a parquet file or a compressed file is converted to;
        None for files that are read as they are.
    """

    path: Path
    table: csv_rows.Table | None = None
    quotes: bool = True
    problem: str | None = None
    lines: Path | None = None

    @property
    def contents(self) -> Path:
        """File that the records are read from."""
        return self.path if self.lines is None else self.lines

    def location(self, line: int) -> str:
        """Names a record, which is on a line of `contents` counted from 1."""
        suffix = content_suffix(self.path)
        # Rows of parquet files are counted from 0.
        number = line - (suffix == ".parquet")
        unit = "row" if self.lines and suffix in csv_rows.DELIMITERS else "line"
        return f"{self.path}, {UNITS.get(suffix, unit)} {number}"

    @property
    def is_text(self) -> bool:
        """Whether each line is a completion as it is."""
        return content_suffix(self.path) == ".txt"

    @property
    def has_lines(self) -> bool:
        """Whether its content, perhaps after decompression, is lines of records."""
        return content_suffix(self.path) in LINES


def find_input_files(
    names: Sequence[str], record: RecordFormat, *, skip: bool = False
) -> list[InputFile]:
    """Finds the named files, and the files in named folders in sorted order.

    Files of unknown types are errors, and so is a file with two names. With `skip`, an
    unusable file is returned with its problem; otherwise it is an error, too.
    """
    paths: list[Path] = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            contents = [file for file in sorted(path.rglob("*")) if file.is_file()]
            usable = [file for file in contents if _is_usable(file)]
            if not usable:
                raise InputError(
                    f"{path} contains {len(contents)} files, but none that ends with "
                    f"{EXPECTED}"
                )
            paths += usable
        else:
            paths.append(path)
    _check_paths(paths)
    return [_open_input(path, record.quotes, skip) for path in paths]


def _is_usable(path: Path) -> bool:
    suffix = content_suffix(path)
    # Pages of parquet are compressed already.
    is_compressed = compression_of(path) is not None
    return suffix in SUFFIXES and not (is_compressed and suffix == ".parquet")


def _check_paths(paths: Sequence[Path]) -> None:
    first_paths: dict[Path, Path] = {}
    for path in paths:
        if not path.is_file():
            raise InputError(f"input {path}: there is no such file or folder")
        if not _is_usable(path):
            raise InputError(
                f"input {path} ends with {shown(path.suffix)}, expected {EXPECTED}, "
                "which determine how it is read"
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
            csv_rows.check_encoding(path)
        if content_suffix(path) in csv_rows.DELIMITERS and compression_of(path) is None:
            table = csv_rows.Table.open(path, quotes, QUOTES_HINT)
            file = dataclasses.replace(file, table=table)
    except InputError as problem:
        if not skip:
            raise
        return dataclasses.replace(file, problem=str(problem))
    return file


def place_lines(files: Sequence[InputFile], folder: Path) -> list[InputFile]:
    """Names the lines in a folder that files are converted to; see `InputFile`."""
    return [
        dataclasses.replace(file, lines=folder / f"input_{number}.jsonl")
        if content_suffix(file.path) in UNITS or compression_of(file.path)
        else file
        for number, file in enumerate(files)
    ]


def file_versions(files: Sequence[InputFile]) -> list[dict[str, str | int]]:
    """Returns the resolved path, size and modification time of files."""
    stats = [(file.path.resolve(), file.path.stat()) for file in files]
    return [
        {"path": str(path), "size": stat.st_size, "modified": stat.st_mtime_ns}
        for path, stat in stats
    ]
