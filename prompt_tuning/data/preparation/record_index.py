"""An index of where each record of a preparation lies.

The index is a file of its own, so that any record is read without those before it and
memory does not grow with the input.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from jaxtyping import Int64

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.preparation.input_files import InputFile
from prompt_tuning.data.preparation.record_spans import spans

_FIELDS = 4
_BUFFERED = 1 << 14

Advance = Callable[[int], None]


class Found(NamedTuple):
    """What the files of an index are.

    Attributes:
      digests: the SHA-256 of each.
      problems: of those in which nothing can be used, why.
    """

    digests: list[str]
    problems: list[str]


def write_index(
    files: Sequence[InputFile], path: Path, advance: Advance, *, skip: bool = False
) -> Found:
    """Writes where every record lies.

    The index has four int64 to a record: the file, the first byte, the number of bytes,
    the line from 1. Lines of nothing but white space are no records.

    Args:
      files: the inputs.
      path: of the index.
      advance: is told the bytes that were read.
      skip: whether a file without a record is passed over.

    Raises:
      InputError: if a file has no record, or all that are passed over have none.
    """
    digests: list[str] = []
    problems: list[str] = []
    with path.open("wb") as index:
        for number, file in enumerate(files):
            digest = hashlib.sha256()
            before = index.tell()
            _index_file(file, number, index, digest.update, advance)
            digests.append(digest.hexdigest())
            if index.tell() == before:
                problems.append(file.problem or _no_record(file))
                if not skip:
                    raise InputError(problems[0])
        if not index.tell():
            raise InputError(f"no input has a record: {problems[0]}")
    return Found(digests, problems)


def _no_record(file: InputFile) -> str:
    what = "row below its header" if file.header else "line with text"
    return f"input {file.path} has no {what}"


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
    for place, span in enumerate(spans(file.path, file.quoting_delimiter, taken)):
        # What cannot be read is read to its end none the less, for its checksum.
        if place < skip or file.problem is not None:
            continue
        rows.append((number, span.start, span.size, span.line))
        if len(rows) == _BUFFERED:
            flush()
    flush()


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
