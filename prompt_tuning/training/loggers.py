"""Other programs that show a run's metrics: TensorBoard, Weights & Biases, trackio.

`metrics.jsonl` stays the record of a run; these get copies of its lines. Each keeps its
own files, and uploads them if you have set it up so: `WANDB_MODE=offline` uploads
nothing.
"""

import importlib
import importlib.util
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from prompt_tuning.config.config_values import CONFIG_FILE, config_values
from prompt_tuning.core.atomic_files import replace_file
from prompt_tuning.core.errors import InputError, shown

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}
"""The package that each logger needs, by its name."""
PROJECT = "prompt_tuning"
RUN_ID_FILE = "logger_run_id"
"""File with the id under which loggers continue a resumed run."""


@runtime_checkable
class Logger(Protocol):
    """A program that shows metrics."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of one step."""

    def close(self) -> None:
        """Ends the run."""


def check_loggers(names: Sequence[str] | None) -> None:
    """Checks the names of loggers, and that their packages are installed.

    Raises:
      InputError: listing the names, or what to install.
    """
    for name in names or ():
        if name not in PACKAGES:
            raise InputError(
                f"Run.loggers names {shown(name)}, expected some of "
                f"{', '.join(PACKAGES)}"
            )
        package = PACKAGES[name]
        if importlib.util.find_spec(package) is None:
            raise InputError(
                f"Run.loggers names {name!r}, which needs the package {package}: "
                f"pip install 'prompt-tuning[{name}]', or leave the logger out"
            )


def open_loggers(
    names: Sequence[str] | None, directory: Path, after_step: int
) -> list[Logger]:
    """Opens the loggers of a run.

    Args:
      names: their names; None for TensorBoard if its package is installed.
      directory: the run directory, with its config.
      after_step: number of completed steps; TensorBoard removes later points.

    Raises:
      InputError: if Weights & Biases or trackio refuses to start.
    """
    if names is None:
        installed = importlib.util.find_spec(PACKAGES["tensorboard"]) is not None
        names = ["tensorboard"] if installed else []
    return [_OPEN[name](directory, after_step) for name in names]


class TensorBoard:
    """Writes TensorBoard files to the run directory."""

    def __init__(self, directory: Path, after_step: int):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(
            str(directory / "tensorboard"), purge_step=after_step + 1
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds a point to the curve of each metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


class Tracked:
    """A run in a module with wandb's interface (wandb, trackio)."""

    def __init__(self, package: str, /, **options: Any):
        module: Any = importlib.import_module(package)
        try:
            module.init(**options)
        # Each has errors of its own, e.g. for a key that is missing.
        except Exception as problem:
            raise InputError(
                f"{package} cannot start: {problem}. Set it up, or leave it out of "
                "Run.loggers"
            ) from problem
        self._module = module

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics."""
        self._module.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finishes the run."""
        self._module.finish()


def _open_wandb(directory: Path, after_step: int) -> Logger:
    return Tracked(
        "wandb",
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=directory.name,
        id=_run_id(directory),
        resume="allow",
        dir=str(directory),
        config=_settings(directory),
    )


def _open_trackio(directory: Path, after_step: int) -> Logger:
    return Tracked(
        "trackio",
        project=PROJECT,
        name=f"{directory.name}-{_run_id(directory)}",
        resume="allow",
        config=_settings(directory),
    )


_OPEN = {"tensorboard": TensorBoard, "wandb": _open_wandb, "trackio": _open_trackio}


def _run_id(directory: Path) -> str:
    """Returns the run's id, which stays the same when it resumes."""
    file = directory / RUN_ID_FILE
    if not file.is_file():
        replace_file(file, secrets.token_hex(4))
    return file.read_text("utf-8")[:64]


def _settings(directory: Path) -> dict[str, str]:
    config = (directory / CONFIG_FILE).read_text("utf-8")
    return config_values(config)
