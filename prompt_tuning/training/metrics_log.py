"""The log of a run: `metrics.jsonl` always, TensorBoard where it can be written."""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path

from prompt_tuning.core.atomic_files import replace_file
from prompt_tuning.processes.group import is_first

METRICS_FILE = "metrics.jsonl"


class MetricsLog:
    """Appends one JSON object a line; a resumed run leaves no line twice."""

    def __init__(self, directory: Path, after_step: int):
        """Opens the log and drops the lines of steps past `after_step`."""
        self._path = directory / METRICS_FILE
        _drop_lines(self._path, after_step)
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

    def close(self) -> None:
        """Ends the log."""
        self._lines.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


class NoLog:
    """That of a process whose neighbour writes the log."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes nothing."""

    def close(self) -> None:
        """Ends nothing."""


def open_log(directory: Path, after_step: int) -> MetricsLog | NoLog:
    """The log of a run, which the first of several processes writes."""
    return MetricsLog(directory, after_step) if is_first() else NoLog()


def _drop_lines(path: Path, after_step: int) -> None:
    """Rewrites the log without later steps, nor a line that a kill cut off."""
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
