"""Files that only grow, so that an interrupted preparation goes on where it was.

Sequences are kept as compressed chunks, in the form that HDF5 stores; what is made of
them at the end is a copy.
"""

import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import h5py
import numpy as np
from jaxtyping import Int32

CHUNK_CELLS = 1 << 14
"""Cells of a column in a chunk: 64 KiB, what is read to see one row."""

LEVEL = 4
_HEADER = struct.Struct("<IQ")

Columns = Mapping[str, tuple[np.dtype, int | float]]
Rows = Int32[np.ndarray, "C m L"]


class AppendLog:
    """A file to which bytes are appended; it is open only while they are.

    Args:
      path: the file.
      size: its bytes that count; what an interrupted process wrote after them is lost.
    """

    def __init__(self, path: Path, size: int = 0):
        self._path = path
        path.touch()
        os.truncate(path, size)

    def append(self, content: bytes) -> None:
        """Adds bytes."""
        if content:
            with self._path.open("ab") as file:
                file.write(content)

    def sync(self) -> int:
        """Brings what was appended to the disk; gives the size."""
        with self._path.open("ab") as file:
            os.fsync(file.fileno())
            return file.tell()


class SequenceLog:
    """The sequences of one output file.

    Attributes:
      rows: how many there are.
      buffer: those that do not fill a chunk yet, `[C, r, L]`.
    """

    def __init__(
        self,
        path: Path,
        count: int,
        length: int,
        *,
        size: int = 0,
        rows: int = 0,
        buffer: Rows | None = None,
    ):
        """Opens the log.

        Args:
          path: its file.
          count: `C`, columns.
          length: `L`, tokens of a sequence.
          size: bytes to go on from; so the next two.
          rows: sequences so far.
          buffer: those among them that are not in the file.
        """
        self._log = AppendLog(path, size)
        self.rows = rows
        empty = np.zeros((count, 0, length), np.int32)
        self.buffer = empty if buffer is None else buffer
        self._per_chunk = rows_per_chunk(length)

    def append(self, sequences: Rows) -> None:
        """Adds sequences."""
        self.rows += sequences.shape[1]
        joined = np.concatenate([self.buffer, sequences], axis=1)
        full = joined.shape[1] // self._per_chunk * self._per_chunk
        for first in range(0, full, self._per_chunk):
            self._write(joined[:, first : first + self._per_chunk])
        self.buffer = joined[:, full:].copy()

    def sync(self) -> int:
        """Brings the chunks to the disk; gives the file's size."""
        return self._log.sync()

    def finish(self) -> None:
        """Writes the last chunk, filled with zeros."""
        count, left, length = self.buffer.shape
        if left:
            last = np.zeros((count, self._per_chunk, length), np.int32)
            last[:, :left] = self.buffer
            self._write(last)
        self._log.sync()

    def _write(self, chunk: Rows) -> None:
        for column, cells in enumerate(chunk):
            packed = _compressed(cells)
            self._log.append(_HEADER.pack(column, len(packed)) + packed)


def _compressed(cells: Int32[np.ndarray, "r L"]) -> bytes:
    """A chunk through HDF5's shuffle filter and its deflate filter."""
    shuffled = np.ascontiguousarray(cells, "<i4").view(np.uint8).reshape(-1, 4).T
    return zlib.compress(shuffled.tobytes(), LEVEL)


def rows_per_chunk(length: int) -> int:
    """How many sequences a chunk of an HDF5 file holds."""
    return max(1, CHUNK_CELLS // length)


def write_hdf5(
    log: Path, target: Path, columns: Columns, rows: int, length: int
) -> None:
    """Makes the HDF5 file of a finished log; the same log gives the same bytes."""
    per_chunk = rows_per_chunk(length)
    with h5py.File(target, "w", libver="earliest") as file:
        sets = [
            file.create_dataset(
                name,
                shape=(rows, length),
                dtype=dtype,
                chunks=(per_chunk, length),
                maxshape=(None, length),
                compression="gzip",
                compression_opts=LEVEL,
                shuffle=True,
                track_times=False,
            )
            for name, (dtype, _) in columns.items()
        ]
        written = [0] * len(sets)
        for column, packed in _chunks(log):
            sets[column].id.write_direct_chunk((written[column], 0), packed)
            written[column] += per_chunk


def _chunks(log: Path) -> Iterator[tuple[int, bytes]]:
    with log.open("rb") as file:
        while header := file.read(_HEADER.size):
            column, size = _HEADER.unpack(header)
            yield column, file.read(size)
