"""The content of a run directory, read without its model."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prompt_tuning.checkpoints.run_store import checkpoint_names, checkpoint_selection
from prompt_tuning.checkpoints.run_store.checkpoint_files import read_state
from prompt_tuning.config.config_values import CONFIG_FILE, IDENTITY_FILE
from prompt_tuning.config.gin_sources import MAXIMUM_BYTES
from prompt_tuning.config.parsed_config import read_values
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.typed_json import read_limited, read_object
from prompt_tuning.training.metrics_log import EVALUATION, METRICS_FILE, read_log
from prompt_tuning.training.provenance import data_checksums, made_with

Values = Mapping[str, Mapping[str, Any]]
Curve = tuple[list[int], list[float]]


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """The content of a run directory.

    `values` are the config's by factory and parameter, `damage` tells in sentences what
    could not be read, `record` is the content of `run.json`, and `checkpoint` that of
    the best checkpoint's `state.json`. `data` has for each scope of the config, e.g.
    "train", the SHA-256 of its data files by path, or the reason why there is none.
    `made_with` has the versions and machines that made the run, in order; empty if
    unknown.
    """

    directory: Path
    config: str
    values: Values
    log: Sequence[Mapping[str, int | float]]
    damage: Sequence[str]
    record: Mapping[str, Any]
    checkpoint: Mapping[str, Any] | None
    data: Mapping[str, Mapping[str, str]]
    made_with: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def read(cls, directory: Path) -> "RecordedRun":
        """Reads a run directory; a damaged log is read as far as possible.

        Raises:
          InputError: if it has no config, or the config cannot be read.
        """
        file = directory / CONFIG_FILE
        if not file.is_file():
            raise InputError(f"{directory} is not a run: it has no {CONFIG_FILE}")
        config = read_limited(file, MAXIMUM_BYTES).decode(errors="replace")
        damage: list[str] = []
        identity = directory / IDENTITY_FILE
        return cls(
            directory,
            config,
            read_values(str(file)),
            _read_log(directory / METRICS_FILE, damage),
            damage,
            read_object(identity).values if identity.is_file() else {},
            _read_checkpoint(directory / checkpoint_names.FOLDER, damage),
            data_checksums(directory, config),
            made_with(directory),
        )

    def setting(self, factory: str, name: str, default: Any = None) -> Any:
        """Returns a value of the config, or the default."""
        value = self.values.get(factory, {}).get(name)
        return default if value is None else value

    def curve(self, metric: str) -> Curve:
        """Returns steps and values of a metric, without values that are not finite."""
        points = [
            (int(line["step"]), float(line[metric]))
            for line in self.log
            if metric in line and math.isfinite(line[metric])
        ]
        return [step for step, _ in points], [value for _, value in points]

    @property
    def metrics(self) -> list[str]:
        """Names of all metrics in the log, in the order of their first lines."""
        names = dict.fromkeys(name for line in self.log for name in line)
        return [name for name in names if name not in ("step", "epoch")]

    @property
    def steps(self) -> tuple[int, int]:
        """Numbers of steps taken, according to the log, and planned."""
        done = max((int(line["step"]) for line in self.log), default=0)
        return done, int(self.setting("Run", "steps", done))

    @property
    def best_step(self) -> int | None:
        """Step of the checkpoint that evaluation uses."""
        return None if self.checkpoint is None else int(self.checkpoint["step"])

    @property
    def has_evaluation(self) -> bool:
        """Whether the config names held-out data."""
        return self.setting("Run", "evaluation") is not None

    def last_evaluation(self) -> dict[str, float]:
        """Returns the newest value of each held-out metric."""
        found: dict[str, float] = {}
        for line in self.log:
            found |= _evaluation(line)
        return found

    def best_evaluation(self) -> dict[str, float]:
        """Returns the metrics of the best step, or the newest if the log lacks them."""
        at_best = (x for x in self.log if x["step"] == self.best_step)
        return _evaluation(next(at_best, {})) or self.last_evaluation()


def _evaluation(line: Mapping[str, int | float]) -> dict[str, float]:
    """Returns the held-out metrics of a line."""
    return {
        name.removeprefix(EVALUATION): float(value)
        for name, value in line.items()
        if name.startswith(EVALUATION)
    }


def _read_log(file: Path, damage: list[str]) -> list[dict[str, int | float]]:
    """Reads the log and describes what is damaged in it."""
    if not file.is_file():
        damage.append(f"There is no {METRICS_FILE}, so there are no curves.")
        return []
    found: list[str] = []
    log = read_log(file, found.append)
    if found:
        damage.append(
            f"{len(found):,} damaged line{'s' * (len(found) > 1)} of {METRICS_FILE} "
            f"left out, {len(log):,} steps were read; the first: {found[0]}."
        )
    odd = sum(not math.isfinite(x) for line in log for x in line.values())
    if odd:
        damage.append(
            f"{odd:,} numbers of the log are not finite and are missing in the curves."
        )
    return log


def _read_checkpoint(folder: Path, damage: list[str]) -> Mapping[str, Any] | None:
    try:
        return read_state(checkpoint_selection.best_or_latest(folder, lambda _: None))
    except InputError as problem:
        damage.append(f"{problem}.")
        return None
