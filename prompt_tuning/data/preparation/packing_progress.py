"""How far the packing is: which splits are done, and which record is next."""

import dataclasses
from typing import Any

import numpy as np

from prompt_tuning.data.preparation.encoding_worker import Done, Task
from prompt_tuning.data.preparation.preparation_metrics import SplitMetrics
from prompt_tuning.data.preparation.preparation_settings import Preparation
from prompt_tuning.data.preparation.scratch_directory import Checkpoint, Scratch
from prompt_tuning.data.preparation.split_writer import SplitWriter

HISTOGRAMS = ("length_histogram", "type_histogram")


@dataclasses.dataclass(frozen=True)
class Finished:
    """A split whose sequences are all in its logs.

    Attributes:
      split: 0 train, 1 development, 2 test.
      metrics: what was counted.
      rows: sequences of each file.
    """

    split: int
    metrics: SplitMetrics
    rows: list[int]


@dataclasses.dataclass
class Progress:
    """Where the packing is; `take` moves it on.

    Attributes:
      scratch: where the logs are.
      preparation: what is asked for.
      pad_id: the id of padding.
      split: of the next record.
      position: of the next record in its split.
      bytes_read: of the input.
      skipped: bytes of the log of records passed over.
      finished: the splits that are done.
      writer: the split at work.
    """

    scratch: Scratch
    preparation: Preparation
    pad_id: int
    split: int = 0
    position: int = 0
    bytes_read: int = 0
    skipped: int = 0
    finished: list[Finished] = dataclasses.field(default_factory=list)
    writer: SplitWriter | None = None

    def take(self, task: Task, done: Done) -> None:
        """Packs what a task gave, finishing the split before if it begins another."""
        if self.writer is not None and task.split != self.split:
            self.leave()
        if self.writer is None:
            self.writer = SplitWriter(
                self.preparation, task.split, self.pad_id, self.scratch.folder
            )
        self.split, self.position = task.split, task.position
        self.bytes_read += task.bytes
        self.writer.take(done)

    def leave(self) -> None:
        """Finishes the split at work, if there is one."""
        if self.writer is None:
            return
        self.writer.finish()
        self.finished.append(
            Finished(self.split, self.writer.metrics, self.writer.rows)
        )
        self.writer = None


def save_progress(scratch: Scratch, progress: Progress) -> None:
    """Keeps the progress, what the logs hold brought to the disk first."""
    values: dict[str, Any] = {
        name: getattr(progress, name)
        for name in ("split", "position", "bytes_read", "skipped")
    }
    arrays: dict[str, np.ndarray] = {}
    values["writer"] = None
    if progress.writer is not None:
        values["writer"], arrays = progress.writer.checkpoint()
    values["finished"] = []
    for done in progress.finished:
        entry = {"split": done.split, "counts": done.metrics.counts, "rows": done.rows}
        values["finished"].append(entry)
        for name in HISTOGRAMS:
            arrays[f"{done.split}.{name}"] = getattr(done.metrics, name)
    scratch.save(Checkpoint(values, arrays))


def load_progress(scratch: Scratch, preparation: Preparation, pad_id: int) -> Progress:
    """The progress that was kept last, or none."""
    progress = Progress(scratch, preparation, pad_id)
    kept = scratch.load()
    if kept is None:
        return progress
    values, arrays = dict(kept.values), kept.arrays
    progress.finished = [
        Finished(
            entry["split"],
            SplitMetrics(
                entry["counts"], *(arrays[f"{entry['split']}.{n}"] for n in HISTOGRAMS)
            ),
            entry["rows"],
        )
        for entry in values.pop("finished")
    ]
    writer = values.pop("writer")
    for name, value in values.items():
        setattr(progress, name, value)
    if writer is not None:
        progress.writer = SplitWriter(
            preparation, progress.split, pad_id, scratch.folder, writer, arrays
        )
    return progress
