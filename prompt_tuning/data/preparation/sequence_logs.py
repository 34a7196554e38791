"""Append-only files that let an interrupted preparation resume.

Sequences are stored as compressed chunks in the encoding of HDF5, so that writing the
HDF5 file at the end only copies them.
"""

import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from prompt_tuning.core.atomic_files import sync_file
from prompt_tuning.data.rows.hdf5_files import open_for_writing

CHUNK_CELLS = 1 << 14
"""Cells per chunk of a column: 64 KiB, the amount read to access one row."""

COMPRESSION_LEVEL = 4
_HEADER = struct.Struct("<IQ")
"""Header of a chunk in a log: its column and its size in bytes."""

Columns = Mapping[str, tuple[np.dtype, int | float]]
SequenceColumns = Int32[np.ndarray, "C m L"]


class AppendLog:
    """A file that bytes are appended to; it is open only during a write.

    Args:
      path: path of the file.
      size: number of valid bytes; the file is truncated to it, which discards what an
        interrupted process wrote after its last checkpoint.
    """

    def __init__(self, path: Path, size: int = 0):
        self._path = path
        path.touch()
        os.truncate(path, size)

    def append(self, content: bytes) -> None:
        """Appends bytes."""
        if content:
            with self._path.open("ab") as file:
                file.write(content)

    def sync(self) -> int:
        """Flushes the file to disk; returns its size."""
        with self._path.open("ab") as file:
            sync_file(file)
            return file.tell()


class SequenceLog:
    """The sequences of one output file.

    Attributes:
      rows: number of sequences.
      buffer: sequences that do not fill a chunk yet, `[C, r, L]`.
    """

    def __init__(
        self,
        path: Path,
        count: int,
        length: int,
        *,
        size: int = 0,
        rows: int = 0,
        buffer: SequenceColumns | None = None,
    ):
        """Opens the log.

        Args:
          path: path of the file.
          count: `C`, number of columns.
          length: `L`, tokens per sequence.
          size: size of the file at the checkpoint to resume from.
          rows: number of sequences at the checkpoint.
          buffer: sequences at the checkpoint that are not in the file.
        """
        self._log = AppendLog(path, size)
        self.rows = rows
        empty = np.zeros((count, 0, length), np.int32)
        self.buffer = empty if buffer is None else buffer
        self._per_chunk = rows_per_chunk(length)

    def append(self, sequences: SequenceColumns) -> None:
        """Appends sequences."""
        self.rows += sequences.shape[1]
        pending = np.concatenate([self.buffer, sequences], axis=1)
        full = pending.shape[1] // self._per_chunk * self._per_chunk
        for first in range(0, full, self._per_chunk):
            self._write(pending[:, first : first + self._per_chunk])
        self.buffer = pending[:, full:].copy()

    def sync(self) -> int:
        """Flushes the chunks to disk; returns the size of the file."""
        return self._log.sync()

    def finish(self) -> None:
        """Writes the last chunk, filled up with zeros."""
        count, remaining, length = self.buffer.shape
        if remaining:
            last = np.zeros((count, self._per_chunk, length), np.int32)
            last[:, :remaining] = self.buffer
            self._write(last)
        self._log.sync()

    def _write(self, chunk: SequenceColumns) -> None:
        for column, cells in enumerate(chunk):
            compressed = _compress(cells)
            self._log.append(_HEADER.pack(column, len(compressed)) + compressed)


def _compress(cells: Int32[np.ndarray, "r L"]) -> bytes:
    """Applies HDF5's shuffle filter, then its deflate filter."""
    # [cells, 4 bytes] -> [4, cells]: all first bytes, then all second bytes, ...
    shuffled = np.ascontiguousarray(cells, "<i4").view(np.uint8).reshape(-1, 4).T
    return zlib.compress(shuffled.tobytes(), COMPRESSION_LEVEL)


def rows_per_chunk(length: int) -> int:
    """Returns the number of sequences per chunk of an HDF5 file."""
    return max(1, CHUNK_CELLS // length)


def write_hdf5(
    log: Path, target: Path, columns: Columns, rows: int, length: int
) -> None:
    """Writes the HDF5 file of a finished log; equal logs give equal bytes."""
    per_chunk = rows_per_chunk(length)
    with open_for_writing(target, libver="earliest") as file:
        datasets = [
            file.create_dataset(
                name,
                shape=(rows, length),
                dtype=dtype,
                chunks=(per_chunk, length),
                maxshape=(None, length),
                compression="gzip",
                compression_opts=COMPRESSION_LEVEL,
                shuffle=True,
                track_times=False,
            )
            for name, (dtype, _) in columns.items()
        ]
        written = [0] * len(datasets)
        for column, compressed in _read_chunks(log):
            datasets[column].id.write_direct_chunk((written[column], 0), compressed)
            written[column] += per_chunk


def _read_chunks(log: Path) -> Iterator[tuple[int, bytes]]:
    with log.open("rb") as file:
        while header := file.read(_HEADER.size):
            column, size = _HEADER.unpack(header)
            yield column, file.read(size)
