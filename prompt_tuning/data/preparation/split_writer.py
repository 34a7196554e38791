"""Packs the examples of one split and distributes the sequences over its files."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64, Integer

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.token_weights import COMPLETION, PADDING, PROMPT, SEPARATOR
from prompt_tuning.data.preparation.encoding_worker import EncodedRecords, columns
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
TYPES = 4
BINS_PER_OCTAVE = 4
BINS = 32 * BINS_PER_OCTAVE

# Keys of metrics.json, where an example is called an article.
_COUNTS = (
    "records",
    "malformed",
    "without_completion",
    "articles",
    "tokens_in",
    "repeated_tokens",
    "dropped_articles",
    "dropped_tokens",
    "truncated_articles",
    "truncated_tokens",
    "sequences_without_completion",
    "tokens_without_completion",
    "sequences",
)

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


@dataclasses.dataclass
class SplitMetrics:
    """Counts of one split.

    Attributes:
      counts: counts by name, see `summary`.
      length_histogram: number of examples by length; bin `b` starts at `2^(b /
        BINS_PER_OCTAVE)` tokens.
      type_histogram: number of tokens by type and position, `[4, L]`.
    """

    counts: dict[str, int]
    length_histogram: Int64[np.ndarray, "b"]
    type_histogram: Int64[np.ndarray, "4 L"]

    def add_examples(self, lengths: Integer[np.ndarray, "a"]) -> None:
        """Counts examples before they are packed."""
        self.counts["articles"] += len(lengths)
        self.counts["tokens_in"] += int(lengths.sum())
        octaves = np.log2(np.maximum(lengths, 1))
        bins = np.floor(octaves * BINS_PER_OCTAVE).astype(np.int64)
        self.length_histogram += np.bincount(bins, minlength=BINS)

    def add_sequences(self, token_types: Int32[np.ndarray, "m L"]) -> None:
        """Counts sequences as they are written."""
        self.counts["sequences"] += len(token_types)
        for kind in range(TYPES):
            self.type_histogram[kind] += np.count_nonzero(token_types == kind, axis=0)

    def summary(self) -> dict[str, Any]:
        """Returns the counts and shares of a split; a share of nothing is None.

        `tokens_in` is the sum of `prompt_tokens`, `completion_tokens`,
        `separator_tokens`, `dropped_tokens`, `truncated_tokens` and
        `tokens_without_completion`.
        """
        prompt, completion, padding, separator = (
            int(self.type_histogram[kind].sum())
            for kind in (PROMPT, COMPLETION, PADDING, SEPARATOR)
        )
        positions = prompt + completion + padding + separator
        used = positions - padding
        return self.counts | {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "separator_tokens": separator,
            "padding_tokens": padding,
            "share_of_positions_used": _share(used, positions),
            "share_of_positions_learned": _share(completion + separator, positions),
            "share_of_tokens_kept": _share(used, self.counts["tokens_in"]),
        }


def empty_metrics(length: int) -> SplitMetrics:
    """Returns the metrics of a split before anything is counted."""
    return SplitMetrics(
        dict.fromkeys(_COUNTS, 0),
        np.zeros(BINS, np.int64),
        np.zeros((TYPES, length), np.int64),
    )


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 6) if whole else None


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
