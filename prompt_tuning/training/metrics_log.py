"""The log of a run, `metrics.jsonl`, and loggers that get its lines."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from prompt_tuning.core.atomic_files import reporting_disk_errors
from prompt_tuning.core.step_log import OnDamage, StepLog, read_lines
from prompt_tuning.core.typed_json import JsonObject
from prompt_tuning.processes.group import is_first
from prompt_tuning.training.fingerprint_log import fingerprint_line, open_fingerprints
from prompt_tuning.training.loggers import open_loggers

METRICS_FILE = "metrics.jsonl"
MAXIMUM_LOG = 2**30
"""Maximum size of a log in bytes."""
EVALUATION = "evaluation/"
"""Prefix of the names of held-out metrics."""
CHANGED = "evaluation_changed"
"""Field that marks a line after which the evaluation's settings changed."""


class MetricsLog:
    """Appends one JSON object per line; a resumed run repeats no line."""

    def __init__(
        self, directory: Path, after_step: int, loggers: Sequence[str] | None = None
    ):
        """Opens the log and removes lines after step `after_step`.

        Raises:
          InputError: if the log is a link out of the directory, or a logger refuses to
            start.
        """
        self._path, self._after_step = directory / METRICS_FILE, after_step
        lines = list(read_lines(self._path, _checked_values, MAXIMUM_LOG))
        kept = [line for line, x in lines if x["step"] <= after_step]
        with contextlib.ExitStack() as opened:
            self._lines = StepLog(self._path, kept)
            opened.callback(self._lines.close)
            self._fingerprints = open_fingerprints(directory, after_step)
            opened.callback(self._fingerprints.close)
            with reporting_disk_errors(self._path):
                self._loggers = open_loggers(loggers, directory, after_step)
            opened.pop_all()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of one step."""
        self._lines.write({"step": step, **metrics})
        with reporting_disk_errors(self._path):
            # They would show a second point for a step that is measured again.
            for logger in self._loggers if step > self._after_step else ():
                logger.write(step, metrics)

    def write_fingerprint(self, step: int, fingerprint: str) -> None:
        """Writes the fingerprint of the trained parameters after a step."""
        self._fingerprints.write(fingerprint_line(step, fingerprint))

    def forget_evaluations(self) -> None:
        """Marks the values of earlier lines as measured with other settings."""
        self._lines.write({"step": 0, CHANGED: 1})

    def sync(self) -> None:
        """Flushes the lines to disk before a checkpoint is published."""
        self._lines.sync()
        self._fingerprints.sync()

    def close(self) -> None:
        """Closes the log."""
        self._lines.close()
        self._fingerprints.close()
        with reporting_disk_errors(self._path):
            for logger in self._loggers:
                logger.close()


class NoLog:
    """The log of all processes but the first, which writes nothing."""

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
    """Opens the log of a run; only the first process writes it."""
    return MetricsLog(directory, after_step, loggers) if is_first() else NoLog()


def read_log(
    file: Path, on_damage: OnDamage | None = None
) -> list[dict[str, int | float]]:
    """Reads a log, without a line that a kill truncated.

    A run that is continued with another metric or evaluation measures its checkpoints
    again, so a step may have more than one line.

    Args:
      file: the log.
      on_damage: called with a message for each skipped line. Invalid lines that are
        JSON are then skipped, too, instead of raising an error.

    Returns:
      one mapping per step, in order, with the newest value of each metric, without
      values of an evaluation that has changed since.

    Raises:
      InputError: if the file cannot be read, or a line is JSON but not an object of
        numbers with a step.
    """
    by_step: dict[int | float, dict[str, int | float]] = {}
    for _, values in read_lines(file, _checked_values, MAXIMUM_LOG, on_damage):
        if CHANGED in values:
            by_step = {step: _without_evaluation(x) for step, x in by_step.items()}
        else:
            by_step.setdefault(values["step"], {}).update(values)
    return [values for _, values in sorted(by_step.items())]


def _without_evaluation(values: Mapping[str, int | float]) -> dict[str, int | float]:
    return {k: value for k, value in values.items() if not k.startswith(EVALUATION)}


def _checked_values(values: JsonObject) -> dict[str, int | float]:
    """Returns the content of a line, if it has a step and only numbers."""
    values.integer("step")
    for name, value in values.values.items():
        if type(value) not in (int, float) or not _is_float(value):
            values.refuse(name, "a number")
    return dict(values.values)


def _is_float(value: float | int) -> bool:
    """Whether a number, possibly infinite or NaN, fits in a float."""
    try:
        float(value)
    except OverflowError:
        return False
    return True
