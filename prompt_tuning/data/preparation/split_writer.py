"""Packs the examples of one split and distributes the sequences over its files."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.token_weights import COMPLETION, PROMPT, SEPARATOR
from prompt_tuning.data.preparation.encoding_worker import EncodedRecords, columns
from prompt_tuning.data.preparation.preparation_metrics import (
    SplitMetrics,
    empty_metrics,
)
from prompt_tuning.data.preparation.preparation_settings import (
    Preparation,
    parse_packing,
)
from prompt_tuning.data.preparation.record_order import SPLIT_NAMES, TEST
from prompt_tuning.data.preparation.sequence_packing import Packer
from prompt_tuning.data.rows.hdf5_files import open_for_writing

TEST_RECORDS = "test.jsonl"
CHUNK_CELLS = 1 << 14
"""Cells per chunk of a column: 64 KiB, the amount read to access one row."""
WRITTEN_CELLS = 1 << 18
"""Cells per column that are written at once."""
PENDING_CELLS = 1 << 24
"""Cells per column that wait to be written, in all files of a split."""
COMPRESSION_LEVEL = 4

Columns = Mapping[str, tuple[np.dtype, int | float]]
SequenceColumns = Int32[np.ndarray, "C m L"]


def file_names(preparation: Preparation, split: int) -> list[str]:
    """Returns the names of a split's HDF5 files."""
    splits = preparation.splits
    count = (splits.train_files, splits.dev_files, splits.test_files)[split]
    name = SPLIT_NAMES[split]
    return [f"{name}_{i}_of_{count}.hdf5" for i in range(1, count + 1)]


def padding_values(preparation: Preparation, pad_id: int) -> Int32[np.ndarray, "C"]:
    """Returns the padding values of the columns, their bits viewed as int32."""
    fills = [
        np.array(fill, dtype).view(np.int32).item()
        for dtype, fill in columns(preparation).values()
    ]
    return np.array([pad_id, *fills[1:]], np.int32)


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


@dataclasses.dataclass(frozen=True)
class FinishedSplit:
    """A split with complete files: `rows` are their numbers of sequences."""

    split: int
    metrics: SplitMetrics
    rows: list[int]


class SplitWriter:
    """Packs the examples of a split and deals the sequences to its files in turn.

    The files' sizes differ by at most one sequence; the first files have more.
    """

    def __init__(self, preparation: Preparation, split: int, pad_id: int, folder: Path):
        self.split = split
        self._keep_prompt_only = preparation.text.keep_prompt_only
        names, length = file_names(preparation, split), preparation.length
        fill = padding_values(preparation, pad_id)
        self._packer = Packer(parse_packing(preparation.packing), length, fill)
        self._metrics: SplitMetrics = empty_metrics(length)
        self._files = [
            SequenceFile(folder / name, columns(preparation), length, len(names))
            for name in names
        ]
        self._test_records = folder / TEST_RECORDS if split == TEST else None

    def add(self, encoded: EncodedRecords) -> None:
        """Packs the result of a task."""
        counts = self._metrics.counts
        counts["records"] += encoded.records
        counts["malformed"] += len(encoded.problems)
        counts["without_completion"] += encoded.without_completion
        counts["repeated_tokens"] += encoded.repeated_tokens
        self._metrics.add_examples(encoded.lengths)
        for sequences in self._packer.add(encoded.tokens, encoded.lengths):
            self._deal(sequences)
        if self._test_records is not None:
            with self._test_records.open("ab") as file:
                file.write(encoded.json_lines)

    def finish(self) -> FinishedSplit:
        """Writes the remaining sequences; every file must get one."""
        self._deal(self._packer.finish())
        for name, totals in (
            ("dropped", self._packer.dropped),
            ("truncated", self._packer.truncated),
        ):
            examples, tokens = map(int, totals)
            self._metrics.counts[f"{name}_articles"] = examples
            self._metrics.counts[f"{name}_tokens"] = tokens
        self._check_rows()
        for file in self._files:
            file.finish()
        rows = [file.rows for file in self._files]
        return FinishedSplit(self.split, self._metrics, rows)

    def _deal(self, sequences: Int32[np.ndarray, "C m L"]) -> None:
        types = sequences[1]  # [m, L]
        if not self._keep_prompt_only:
            learned = ((types == COMPLETION) | (types == SEPARATOR)).any(axis=1)  # [m]
            if not learned.all():
                counts = self._metrics.counts
                counts["sequences_without_completion"] += int((~learned).sum())
                # These sequences hold only prompts and padding, and padding is not
                # part of any example.
                prompts = types[~learned] == PROMPT
                counts["tokens_without_completion"] += int(prompts.sum())
                sequences = sequences[:, learned]
        first, files = self._metrics.counts["sequences"], len(self._files)
        self._metrics.add_sequences(sequences[1])
        for number, file in enumerate(self._files):
            file.append(sequences[:, (number - first) % files :: files])

    def _check_rows(self) -> None:
        counts, name = self._metrics.counts, SPLIT_NAMES[self.split]
        sequences = counts["sequences"]
        if sequences >= len(self._files):
            return
        if not sequences:
            raise InputError(
                f"nothing is left in the {name} split: {counts['records']} of its "
                f"records were used, {counts['malformed']} were malformed and "
                f"{counts['without_completion']} had no completion; "
                f"{counts['dropped_articles']} examples were longer than a sequence "
                "and were dropped; see --length, --packing and --keep_prompt_only"
            )
        raise InputError(
            f"the {name} split has {sequences} sequences, expected at least "
            f"{len(self._files)}, one for each file: reduce --{name}_files"
        )
