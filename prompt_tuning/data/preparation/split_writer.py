"""Packs the examples of one split and distributes the sequences over its files."""

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
from prompt_tuning.data.preparation.sequence_logs import AppendLog, SequenceLog
from prompt_tuning.data.preparation.sequence_packing import Packer

Arrays = Mapping[str, np.ndarray]
TEST_RECORDS = "test.jsonl"


def file_names(preparation: Preparation, split: int) -> list[str]:
    """Returns the names of a split's HDF5 files."""
    splits = preparation.splits
    count = (splits.train_files, splits.dev_files, splits.test_files)[split]
    name = SPLIT_NAMES[split]
    return [f"{name}_{i}_of_{count}.hdf5" for i in range(1, count + 1)]


def padding_values(preparation: Preparation, pad_id: int) -> Int32[np.ndarray, "C"]:
    """Returns the padding value of each column, its bits viewed as int32."""
    fills = [
        np.array(fill, dtype).view(np.int32).item()
        for dtype, fill in columns(preparation).values()
    ]
    return np.array([pad_id, *fills[1:]], np.int32)


class SplitWriter:
    """Packs the examples of a split and deals the sequences to its files in turn.

    The files' sizes differ by at most one sequence; the first files have more.

    Attributes:
      metrics: counts of the split.
    """

    def __init__(
        self,
        preparation: Preparation,
        split: int,
        pad_id: int,
        folder: Path,
        values: Mapping[str, Any] | None = None,
        arrays: Arrays | None = None,
    ):
        """Opens the logs of the split, empty or as they were at a checkpoint.

        Args:
          preparation: settings of the preparation.
          split: 0 train, 1 development, 2 test.
          pad_id: id of the padding token.
          folder: folder with the logs.
          values: first result of `checkpoint`; None to start.
          arrays: second result of `checkpoint`; None to start.
        """
        saved = {} if values is None else dict(values)
        self._split = split
        self._keep_prompt_only = preparation.text.keep_prompt_only
        self._names = file_names(preparation, split)
        length, fill = preparation.length, padding_values(preparation, pad_id)
        self._packer = Packer(parse_packing(preparation.packing), length, fill)
        self.metrics: SplitMetrics = empty_metrics(length)
        if arrays is not None:
            self._restore(saved["counts"], arrays)
        self._logs = [
            SequenceLog(
                folder / f"{name}.log",
                len(fill),
                length,
                buffer=None if arrays is None else arrays[f"buffer.{name}"],
                **saved.get("logs", {}).get(name, {}),
            )
            for name in self._names
        ]
        self._test_records = None
        if split == TEST:
            self._test_records = AppendLog(folder / TEST_RECORDS, saved.get("texts", 0))

    def _restore(self, counts: Mapping[str, int], arrays: Arrays) -> None:
        self.metrics.counts = dict(counts)
        self.metrics.length_histogram = arrays["length_histogram"]
        self.metrics.type_histogram = arrays["type_histogram"]
        self._packer.carry = arrays["carry"]
        self._packer.dropped = arrays["dropped"]
        self._packer.truncated = arrays["truncated"]

    @property
    def rows(self) -> list[int]:
        """Number of sequences in each file."""
        return [log.rows for log in self._logs]

    def add(self, encoded: EncodedRecords) -> None:
        """Packs the result of a task."""
        counts = self.metrics.counts
        counts["records"] += encoded.records
        counts["malformed"] += len(encoded.problems)
        counts["without_completion"] += encoded.without_completion
        self.metrics.add_examples(encoded.lengths)
        for sequences in self._packer.add(encoded.tokens, encoded.lengths):
            self._deal(sequences)
        if self._test_records is not None:
            self._test_records.append(encoded.json_lines)

    def finish(self) -> None:
        """Writes the remaining sequences.

        Raises:
          InputError: if there are fewer sequences than files.
        """
        self._deal(self._packer.finish())
        for name, totals in (
            ("dropped", self._packer.dropped),
            ("truncated", self._packer.truncated),
        ):
            examples, tokens = map(int, totals)
            self.metrics.counts[f"{name}_articles"] = examples
            self.metrics.counts[f"{name}_tokens"] = tokens
        self._check_rows()
        for log in self._logs:
            log.finish()
        if self._test_records is not None:
            self._test_records.sync()

    def checkpoint(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Flushes the logs to disk; returns the state needed to resume."""
        sizes = [log.sync() for log in self._logs]
        records = self._test_records
        values: dict[str, Any] = {
            "counts": self.metrics.counts,
            "logs": {
                name: {"size": size, "rows": log.rows}
                for name, size, log in zip(self._names, sizes, self._logs, strict=True)
            },
            "texts": 0 if records is None else records.sync(),
        }
        arrays = {
            "length_histogram": self.metrics.length_histogram,
            "type_histogram": self.metrics.type_histogram,
            "carry": self._packer.carry,
            "dropped": self._packer.dropped,
            "truncated": self._packer.truncated,
        }
        for name, log in zip(self._names, self._logs, strict=True):
            arrays[f"buffer.{name}"] = log.buffer
        return values, arrays

    def _deal(self, sequences: Int32[np.ndarray, "C m L"]) -> None:
        types = sequences[1]  # [m, L]
        if not self._keep_prompt_only:
            learned = ((types == COMPLETION) | (types == SEPARATOR)).any(axis=1)  # [m]
            if not learned.all():
                counts = self.metrics.counts
                counts["sequences_without_completion"] += int((~learned).sum())
                # These sequences hold only prompts and padding, and padding is not
                # part of any example.
                prompts = types[~learned] == PROMPT
                counts["tokens_without_completion"] += int(prompts.sum())
                sequences = sequences[:, learned]
        first, files = self.metrics.counts["sequences"], len(self._logs)
        self.metrics.add_sequences(sequences[1])
        for number, log in enumerate(self._logs):
            log.append(sequences[:, (number - first) % files :: files])

    def _check_rows(self) -> None:
        counts, name = self.metrics.counts, SPLIT_NAMES[self._split]
        sequences = counts["sequences"]
        if sequences >= len(self._logs):
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
            f"{len(self._logs)}, one for each file: reduce --{name}_files"
        )
