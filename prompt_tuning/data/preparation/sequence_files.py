"""HDF5 files of sequences; appends rows a few chunks at a time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from prompt_tuning.data.rows.hdf5_files import open_for_writing

CHUNK_CELLS = 1 << 14
"""Cells per chunk of a column: 64 KiB, the amount read to access one row."""
WRITTEN_CELLS = 1 << 18
"""Cells per column that are written at once."""
PENDING_CELLS = 1 << 24
"""Cells per column that wait to be written, in all files of a split."""
COMPRESSION_LEVEL = 4

Columns = Mapping[str, tuple[np.dtype, int | float]]
SequenceColumns = Int32[np.ndarray, "C m L"]


class SequenceFile:
    """The `rows` sequences of one file, which is open only while they are written.

    Equal sequences give equal bytes, however they are divided.
    """

    def __init__(self, path: Path, columns: Columns, length: int, files: int):
        """Creates one of `files` files of sequences of `length` tokens."""
        self.rows = 0
        self._path, self._columns = path, columns
        self._pending: list[SequenceColumns] = []
        self._written = 0
        chunk = max(1, CHUNK_CELLS // length)
        cells = min(WRITTEN_CELLS, PENDING_CELLS // files)
        self._at_once = chunk * max(1, cells // (chunk * length))
        with open_for_writing(path, libver="earliest") as file:
            for name, (dtype, _) in columns.items():
                file.create_dataset(
                    name,
                    shape=(0, length),
                    dtype=dtype,
                    chunks=(chunk, length),
                    maxshape=(None, length),
                    compression="gzip",
                    compression_opts=COMPRESSION_LEVEL,
                    shuffle=True,
                    track_times=False,
                )

    def append(self, sequences: SequenceColumns) -> None:
        """Appends sequences; each column has the bits of its type."""
        if not sequences.shape[1]:
            return
        self.rows += sequences.shape[1]
        self._pending.append(sequences.copy())
        if self.rows - self._written >= self._at_once:
            joined = np.concatenate(self._pending, axis=1)
            full = joined.shape[1] // self._at_once * self._at_once
            for first in range(0, full, self._at_once):
                self._write(joined[:, first : first + self._at_once])
            self._pending = [joined[:, full:].copy()]

    def finish(self) -> None:
        """Writes the remaining sequences."""
        if self._pending:
            self._write(np.concatenate(self._pending, axis=1))
            self._pending = []

    def _write(self, sequences: SequenceColumns) -> None:
        first, self._written = self._written, self._written + sequences.shape[1]
        with open_for_writing(self._path, "r+", libver="earliest") as file:
            for name, cells in zip(self._columns, sequences, strict=True):
                dataset: Any = file[name]
                dataset.resize(self._written, axis=0)
                dataset[first:] = cells.view(dataset.dtype)
