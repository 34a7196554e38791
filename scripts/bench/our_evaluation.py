"""Our side of the evaluation cases: `evaluate` of the Python interface.

python -m scripts.bench.our_evaluation FOLDER   # answers `workers` questions
"""

import sys
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import prompt_tuning
from scripts.bench.evaluation_tasks import (
    BATCH,
    EXACT_MATCH,
    METRICS,
    NEW_TOKENS,
    RANKING,
    Task,
    read_task,
)
from scripts.bench.workers import Answer, peak_memory, serve

PROMPT_TOKEN, COMPLETION_TOKEN, PADDING = range(3)
"""Types of tokens in an HDF5 file of rows."""


def main() -> None:
    """Answers questions until standard input ends."""
    side = OurEvaluation(Path(sys.argv[1]))
    serve({"open": side.open, "run": side.run, "memory": peak_memory})


class OurEvaluation:
    """A tuned model and the files of the tasks."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._tuned = prompt_tuning.load_tuned(
            folder / "prompt.npy", base=folder / "model"
        )
        self._settings: dict[str, dict[str, Any]] = {}

    def open(self, name: str) -> Answer:
        """Writes the rows of a task as an HDF5 file, as `prepare` does."""
        task = read_task(self._folder, name)
        write_rows(task, self._folder / f"{name}.hdf5")
        self._settings[name] = {
            EXACT_MATCH: {"exact_match": True, "new_tokens": NEW_TOKENS},
            RANKING: {"labels": list(task.label_texts)},
        }.get(name, {})
        return {}

    def run(self, name: str) -> Answer:
        """Evaluates a task; returns the seconds of the call and the metric."""
        started = time.perf_counter()
        metrics = self._tuned.evaluate(
            self._folder / f"{name}.hdf5",
            batch_size=BATCH,
            add_eos=False,
            **self._settings[name],
        )
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "metric": metrics[METRICS[name]]}


def write_rows(task: Task, file: Path) -> None:
    """Writes rows and their token types, padded to the longest."""
    rows = [[*x, *y] for x, y in zip(task.given, task.answers, strict=True)]
    shape = (len(rows), max(map(len, rows)))
    ids = np.zeros(shape, np.int32)
    types = np.full(shape, PADDING, np.int32)
    for i, (row, given) in enumerate(zip(rows, task.given, strict=True)):
        ids[i, : len(row)] = row
        types[i, : len(row)] = COMPLETION_TOKEN
        types[i, : len(given)] = PROMPT_TOKEN
    with h5py.File(file, "w") as written:
        written["input_ids"], written["token_type_ids"] = ids, types


if __name__ == "__main__":
    main()
