"""The log of a run: `metrics.jsonl`, and programs that get its lines too."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prompt_tuning.core.atomic_files import (
    replace_file,
    reporting_disk_errors,
    sync_file,
    sync_path,
)
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.file_names import check_links
from prompt_tuning.core.typed_json import as_object, parse_json, read_limited
from prompt_tuning.processes.group import is_first
from prompt_tuning.training.fingerprint_log import FingerprintLog
from prompt_tuning.training.loggers import open_loggers

METRICS_FILE = "metrics.jsonl"
MAXIMUM_LOG = 2**30
"""Maximum size of a log in bytes."""
EVALUATION = "evaluation/"
"""Beginning of the names of metrics on held-out data."""
CHANGED = "evaluation_changed"
"""Field of a line after which the run was measured in another way."""


class MetricsLog:
    """Appends one JSON object per line; a resumed run repeats no line."""

    def __init__(
        self,
        directory: Path,
        after_step: int,
        loggers: Sequence[str] | None = None,
    ):
        """Opens the log and removes the lines of steps after `after_step`.

        Args:
          directory: run directory.
          after_step: number of completed steps.
          loggers: names of programs that get the lines too; see `open_loggers`.

        Raises:
          InputError: if the log is a link out of the directory, or a logger refuses to
            start.
        """
        check_links(directory, METRICS_FILE)
        self._path, self._after_step = directory / METRICS_FILE, after_step
        with reporting_disk_errors(self._path):
            _drop_lines(self._path, after_step)
            self._path.touch()
            sync_path(directory)
            self._lines = self._path.open("a")
            self._fingerprints = FingerprintLog(directory, after_step)
            self._loggers = open_loggers(loggers, directory, after_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of one step."""
        with reporting_disk_errors(self._path):
            self._lines.write(json.dumps({"step": step, **metrics}) + "\n")
            self._lines.flush()
            # They would draw a second point for a step that is measured again.
            for logger in self._loggers if step > self._after_step else ():
                logger.write(step, metrics)

    def write_fingerprint(self, step: int, fingerprint: str) -> None:
        """Writes the fingerprint of the trained parameters after a step."""
        self._fingerprints.write(step, fingerprint)

    def forget_evaluations(self) -> None:
        """Marks that values of earlier lines were measured in another way."""
        with reporting_disk_errors(self._path):
            self._lines.write(json.dumps({"step": 0, CHANGED: 1}) + "\n")
            self._lines.flush()

    def sync(self) -> None:
        """Flushes the lines to the disk.

        Call it before a checkpoint is published: a power cut must not leave a
        checkpoint without the lines of the steps before it.
        """
        with reporting_disk_errors(self._path):
            sync_file(self._lines)
        self._fingerprints.sync()

    def close(self) -> None:
        """Closes the log."""
        with reporting_disk_errors(self._path):
            self._lines.close()
            self._fingerprints.close()
            for logger in self._loggers:
                logger.close()


class NoLog:
    """The log of every process but the first, which writes the log."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes nothing."""

    def write_fingerprint(self, step: int, fingerprint: str) -> None:
        """Writes nothing."""

    def forget_evaluations(self) -> None:
        """Does nothing."""

    def sync(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def open_log(
    directory: Path, after_step: int, loggers: Sequence[str] | None = None
) -> MetricsLog | NoLog:
    """Opens the log of a run; only the first of several processes writes it."""
    return MetricsLog(directory, after_step, loggers) if is_first() else NoLog()


OnDamage = Callable[[str], None]


def read_log(
    file: Path, on_damage: OnDamage | None = None
) -> list[dict[str, int | float]]:
    """Reads a log, without a line that a kill truncated.

    A run that is continued with another metric or evaluation measures its checkpoints
    again, so a step may have several lines.

    Args:
      file: the log.
      on_damage: called with a message for each line that is left out; lines that are
        JSON are then left out, too, instead of refused.

    Returns:
      one mapping for each step, in their order, with the newest value of each metric.
      Values of an evaluation that has changed since are left out.

    Raises:
      InputError: if the file cannot be read, and for a line that is JSON, but not an
        object of numbers with a step.
    """
    check_links(file.parent, file.name)
    by_step: dict[int | float, dict[str, int | float]] = {}
    for _, values in _parsed_lines(file, on_damage):
        if CHANGED in values:
            by_step = {step: _without_evaluation(x) for step, x in by_step.items()}
        else:
            by_step.setdefault(values["step"], {}).update(values)
    return [values for _, values in sorted(by_step.items())]


def _without_evaluation(values: Mapping[str, int | float]) -> dict[str, int | float]:
    return {k: value for k, value in values.items() if not k.startswith(EVALUATION)}


def _parsed_lines(
    file: Path, on_damage: OnDamage | None = None
) -> Iterator[tuple[bytes, dict[str, int | float]]]:
    """Yields each line of JSON with its content; see `read_log`."""
    for number, line in enumerate(read_limited(file, MAXIMUM_LOG).splitlines(), 1):
        source = f"line {number} of {file}"
        try:
            content = parse_json(line, source)
        except InputError as problem:
            if on_damage is not None:
                on_damage(str(problem))
            continue
        try:
            values = _checked_values(content, source)
        except InputError as problem:
            if on_damage is None:
                raise
            on_damage(str(problem))
            continue
        yield line, values


def _checked_values(content: Any, source: str) -> dict[str, int | float]:
    """Returns the content of a line, which is an object of numbers with a step."""
    values = as_object(content, source)
    values.integer("step")
    for name, value in values.values.items():
        if type(value) not in (int, float) or not _is_float(value):
            values.refuse(name, "a number")
    return dict(values.values)


def _is_float(value: float | int) -> bool:
    """Returns whether a number, possibly infinite or NaN, fits a float."""
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _drop_lines(path: Path, after_step: int) -> None:
    """Rewrites the log without later steps and without a line that a kill truncated."""
    if not path.exists():
        return
    kept = [
        line + b"\n"
        for line, values in _parsed_lines(path)
        if values["step"] <= after_step
    ]
    replace_file(path, b"".join(kept).decode())
