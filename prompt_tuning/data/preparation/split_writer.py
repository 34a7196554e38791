"""One split on its way: articles are packed, and the sequences dealt to its files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.token_weights import COMPLETION, SEPARATOR
from prompt_tuning.data.preparation.encoding_worker import Done, columns
from prompt_tuning.data.preparation.preparation_metrics import SplitMetrics, no_metrics
from prompt_tuning.data.preparation.preparation_settings import (
    Preparation,
    parse_packing,
)
from prompt_tuning.data.preparation.record_order import SPLIT_NAMES, TEST
from prompt_tuning.data.preparation.sequence_logs import AppendLog, SequenceLog
from prompt_tuning.data.preparation.sequence_packing import Packer

Arrays = Mapping[str, np.ndarray]
TEXTS = "test.jsonl"


def file_names(preparation: Preparation, split: int) -> list[str]:
    """The HDF5 files of a split."""
    splits = preparation.splits
    count = (splits.train_files, splits.dev_files, splits.test_files)[split]
    name = SPLIT_NAMES[split]
    return [f"{name}_{i}_of_{count}.hdf5" for i in range(1, count + 1)]


def padding(preparation: Preparation, pad_id: int) -> Int32[np.ndarray, "C"]:
    """What fills each column behind the last article of a sequence."""
    fills = [
        np.array(fill, dtype).view(np.int32).item()
        for dtype, fill in columns(preparation).values()
    ]
    return np.array([pad_id, *fills[1:]], np.int32)


class SplitWriter:
    """Packs the articles of a split and deals its sequences, one to each file in turn.

    So the files are equal but for one sequence, of which the first have more.

    Attributes:
      metrics: what was counted.
      rows: sequences of each file.
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
        """Opens the split's logs, anew or where a checkpoint has them.

        Args:
          preparation: what is asked for.
          split: 0 train, 1 development, 2 test.
          pad_id: the id of padding.
          folder: where the logs are.
          values: what `checkpoint` gave; None to begin.
          arrays: the same.
        """
        known = {} if values is None else dict(values)
        self._split = split
        self._keep_prompt_only = preparation.text.keep_prompt_only
        self._names = file_names(preparation, split)
        length, fill = preparation.length, padding(preparation, pad_id)
        self._packer = Packer(parse_packing(preparation.packing), length, fill)
        self.metrics: SplitMetrics = no_metrics(length)
        if arrays is not None:
            self._go_on(known["counts"], arrays)
        self._logs = [
            SequenceLog(
                folder / f"{name}.log",
                len(fill),
                length,
                buffer=None if arrays is None else arrays[f"buffer.{name}"],
                **known.get("logs", {}).get(name, {}),
            )
            for name in self._names
        ]
        self._texts = None
        if split == TEST:
            self._texts = AppendLog(folder / TEXTS, known.get("texts", 0))

    def _go_on(self, counts: Mapping[str, int], arrays: Arrays) -> None:
        self.metrics.counts = dict(counts)
        self.metrics.length_histogram = arrays["length_histogram"]
        self.metrics.type_histogram = arrays["type_histogram"]
        self._packer.carry = arrays["carry"]
        self._packer.dropped = arrays["dropped"]
        self._packer.truncated = arrays["truncated"]

    @property
    def rows(self) -> list[int]:
        """Sequences of each file."""
        return [log.rows for log in self._logs]

    def take(self, done: Done) -> None:
        """Packs what a task gave."""
        counts = self.metrics.counts
        counts["records"] += done.records
        counts["malformed"] += len(done.problems)
        counts["without_completion"] += done.without_completion
        self.metrics.add_articles(done.lengths)
        for sequences in self._packer.add(done.tokens, done.lengths):
            self._deal(sequences)
        if self._texts is not None:
            self._texts.append(done.texts)

    def finish(self) -> None:
        """Writes what is left over.

        Raises:
          InputError: if there are fewer sequences than files.
        """
        self._deal(self._packer.finish())
        for name, pair in (
            ("dropped", self._packer.dropped),
            ("truncated", self._packer.truncated),
        ):
            articles, tokens = map(int, pair)
            self.metrics.counts[f"{name}_articles"] = articles
            self.metrics.counts[f"{name}_tokens"] = tokens
        self._check_rows()
        for log in self._logs:
            log.finish()
        if self._texts is not None:
            self._texts.sync()

    def checkpoint(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Brings the logs to the disk; gives what it takes to go on."""
        sizes = [log.sync() for log in self._logs]
        values: dict[str, Any] = {
            "counts": self.metrics.counts,
            "logs": {
                name: {"size": size, "rows": log.rows}
                for name, size, log in zip(self._names, sizes, self._logs, strict=True)
            },
            "texts": 0 if self._texts is None else self._texts.sync(),
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
        types = sequences[1]
        if not self._keep_prompt_only:
            learned = ((types == COMPLETION) | (types == SEPARATOR)).any(axis=1)
            if not learned.all():
                counts = self.metrics.counts
                counts["sequences_without_completion"] += int((~learned).sum())
                # Only prompts and padding are in them; padding is of no article.
                counts["tokens_without_completion"] += int((types[~learned] == 0).sum())
                sequences = sequences[:, learned]
        first, files = self.metrics.counts["sequences"], len(self._logs)
        self.metrics.add_sequences(sequences[1])
        for number, log in enumerate(self._logs):
            log.append(sequences[:, (number - first) % files :: files])

    def _check_rows(self) -> None:
        sequences, name = self.metrics.counts["sequences"], SPLIT_NAMES[self._split]
        if sequences >= len(self._logs):
            return
        counts = self.metrics.counts
        if not sequences:
            raise InputError(
                f"nothing is left in the {name} split: {counts['records']} of its "
                f"records were used, {counts['malformed']} malformed, "
                f"{counts['without_completion']} without a completion; "
                f"{counts['dropped_articles']} articles were longer than a sequence "
                "and dropped; see --length, --packing and --keep_prompt_only"
            )
        raise InputError(
            f"the {name} split has {sequences} sequences, expected at least "
            f"{len(self._logs)}, one for each file: ask for fewer --{name}_files"
        )
