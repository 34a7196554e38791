"""The log of a run: `metrics.jsonl`, and TensorBoard if tensorboardX is installed."""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path

from prompt_tuning.core.atomic_files import replace_file, sync_file, sync_path
from prompt_tuning.processes.group import is_first

METRICS_FILE = "metrics.jsonl"


class MetricsLog:
    """Appends one JSON object per line; a resumed run repeats no line."""

    def __init__(self, directory: Path, after_step: int):
        """Opens the log and removes the lines of steps after `after_step`."""
        self._path = directory / METRICS_FILE
        _drop_lines(self._path, after_step)
        self._path.touch()
        sync_path(directory)
        self._lines = self._path.open("a")
        self._tensorboard = None
        if importlib.util.find_spec("tensorboardX") is not None:
            from tensorboardX import SummaryWriter

            self._tensorboard = SummaryWriter(
                str(directory / "tensorboard"), purge_step=after_step + 1
            )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of one step."""
        self._lines.write(json.dumps({"step": step, **metrics}) + "\n")
        self._lines.flush()
        if self._tensorboard is not None:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, step)

    def sync(self) -> None:
        """Flushes the lines to the disk.

        Call it before a checkpoint is published: a power cut must not leave a
        checkpoint without the lines of the steps before it.
        """
        sync_file(self._lines)

    def close(self) -> None:
        """Closes the log."""
        self._lines.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


class NoLog:
    """The log of every process but the first, which writes the log."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes nothing."""

    def sync(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def open_log(directory: Path, after_step: int) -> MetricsLog | NoLog:
    """Opens the log of a run; only the first of several processes writes it."""
    return MetricsLog(directory, after_step) if is_first() else NoLog()


def _drop_lines(path: Path, after_step: int) -> None:
    """Rewrites the log without later steps and without a line that a kill truncated."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            step = json.loads(line)["step"]
        except (json.JSONDecodeError, KeyError):
            continue
        if step <= after_step:
            kept.append(line + "\n")
    replace_file(path, "".join(kept))
