"""Progress of packing: the finished splits and the next record, with checkpoints."""

import dataclasses
from typing import Any

import numpy as np

from prompt_tuning.data.preparation.encoding_worker import EncodedRecords, EncodingTask
from prompt_tuning.data.preparation.preparation_metrics import SplitMetrics
from prompt_tuning.data.preparation.preparation_settings import Preparation
from prompt_tuning.data.preparation.scratch_directory import (
    ScratchCheckpoint,
    ScratchDirectory,
)
from prompt_tuning.data.preparation.split_writer import SplitWriter

HISTOGRAMS = ("length_histogram", "type_histogram")


@dataclasses.dataclass(frozen=True)
class FinishedSplit:
    """A split whose sequences are all in its logs.

    Attributes:
      split: 0 train, 1 development, 2 test.
      metrics: counts of the split.
      rows: number of sequences in each file.
    """

    split: int
    metrics: SplitMetrics
    rows: list[int]


@dataclasses.dataclass
class PackingProgress:
    """Position of the packing; `add` advances it.

    Attributes:
      scratch: directory with the logs.
      preparation: settings of the preparation.
      pad_id: id of the padding token.
      split: split of the next record.
      position: position of the next record in its split.
      bytes_read: number of input bytes read.
      skipped: size in bytes of the log of skipped records.
      finished: the finished splits.
      writer: writer of the current split; None between splits.
    """

    scratch: ScratchDirectory
    preparation: Preparation
    pad_id: int
    split: int = 0
    position: int = 0
    bytes_read: int = 0
    skipped: int = 0
    finished: list[FinishedSplit] = dataclasses.field(default_factory=list)
    writer: SplitWriter | None = None

    def add(self, task: EncodingTask, encoded: EncodedRecords) -> None:
        """Packs a task's records; finishes the current split if they start another."""
        if self.writer is not None and task.split != self.split:
            self.finish_split()
        if self.writer is None:
            self.writer = SplitWriter(
                self.preparation, task.split, self.pad_id, self.scratch.path
            )
        self.split, self.position = task.split, task.position
        self.bytes_read += task.bytes
        self.writer.add(encoded)

    def finish_split(self) -> None:
        """Finishes the current split, if there is one."""
        if self.writer is None:
            return
        self.writer.finish()
        self.finished.append(
            FinishedSplit(self.split, self.writer.metrics, self.writer.rows)
        )
        self.writer = None


def save_progress(scratch: ScratchDirectory, progress: PackingProgress) -> None:
    """Saves a checkpoint of the progress, after flushing the logs to disk."""
    values: dict[str, Any] = {
        name: getattr(progress, name)
        for name in ("split", "position", "bytes_read", "skipped")
    }
    arrays: dict[str, np.ndarray] = {}
    values["writer"] = None
    if progress.writer is not None:
        values["writer"], arrays = progress.writer.checkpoint()
    values["finished"] = []
    for split in progress.finished:
        entry = {
            "split": split.split,
            "counts": split.metrics.counts,
            "rows": split.rows,
        }
        values["finished"].append(entry)
        for name in HISTOGRAMS:
            arrays[f"{split.split}.{name}"] = getattr(split.metrics, name)
    scratch.save(ScratchCheckpoint(values, arrays))


def load_progress(
    scratch: ScratchDirectory, preparation: Preparation, pad_id: int
) -> PackingProgress:
    """Returns the last saved progress, or that of a start if none was saved."""
    progress = PackingProgress(scratch, preparation, pad_id)
    checkpoint = scratch.load()
    if checkpoint is None:
        return progress
    values, arrays = dict(checkpoint.values), checkpoint.arrays
    progress.finished = [
        FinishedSplit(
            entry["split"],
            SplitMetrics(
                entry["counts"], *(arrays[f"{entry['split']}.{n}"] for n in HISTOGRAMS)
            ),
            entry["rows"],
        )
        for entry in values.pop("finished")
    ]
    writer_values = values.pop("writer")
    for name, value in values.items():
        setattr(progress, name, value)
    if writer_values is not None:
        progress.writer = SplitWriter(
            preparation, progress.split, pad_id, scratch.path, writer_values, arrays
        )
    return progress
