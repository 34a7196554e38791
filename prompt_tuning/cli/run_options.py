"""The run that a command is about, from its options."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax

from prompt_tuning import __version__, processes
from prompt_tuning.config import gin_files
from prompt_tuning.config.run import Run
from prompt_tuning.core.errors import InputError
from prompt_tuning.sweep.sweep_summary import best_member
from prompt_tuning.training.run_directory import CONFIG_FILE, relevant_lines


def read_run(options: argparse.Namespace) -> Run:
    """The run of `--run` or of the gin files.

    Raises:
      InputError: if there is none, or its config cannot be used.
    """
    files, directory = list(options.gin_file), options.run
    if directory is not None:
        directory = best_member(Path(directory)) or directory
        config = Path(directory) / CONFIG_FILE
        if not config.exists():
            raise InputError(
                f"{directory} holds no {CONFIG_FILE}, so it is no run's directory"
            )
        return run_in(Path(directory), options.bindings, files)
    return gin_files.read_run(files, options.bindings)


def run_in(directory: Path, bindings: Sequence[str], files: Sequence[str] = ()) -> Run:
    """The run that a directory holds.

    Args:
      directory: has the run's config.
      bindings: read after it, as `files` are.
      files: gin files.

    Raises:
      InputError: if the config cannot be used.
    """
    config = str(directory / CONFIG_FILE)
    run = gin_files.read_run([config, *files], bindings)
    # The directory may have been moved since the run wrote its config.
    return dataclasses.replace(run, directory=str(directory))


OWN_OPTIONS = ("coordinator", "process", "texts", "gin_file", "bindings", "run")
"""What each of several processes may be given otherwise: files that lie elsewhere but
say the same, and what process 0 tells the others."""


def check_processes(options: argparse.Namespace, run: Run) -> None:
    """Refuses a run that its processes cannot share.

    Call it before the model is read.

    Raises:
      InputError: on every process, if they were given different configs or options, or
        the run names no mesh.
    """
    processes.check_same("settings", lambda: _settings(options))
    count = processes.count()
    if run.mesh is None and count > 1:
        raise InputError(
            f"{count} processes were started, but Run.mesh is None, so each would do "
            "all of the work: set --gin.Run.mesh=@MeshShape()"
        )


def idle_devices(run: Run) -> list[str]:
    """A line that says how many devices have no work, if any."""
    devices = jax.device_count()
    if run.mesh is not None or devices == 1:
        return []
    return [
        f"{devices - 1} of {devices} devices have no work: "
        "--gin.Run.mesh=@MeshShape() splits each batch among all"
    ]


def _settings(options: argparse.Namespace) -> list[str]:
    """A line for each setting that must be the same everywhere."""
    given = {k: x for k, x in vars(options).items() if k not in OWN_OPTIONS}
    return [
        f"prompt_tuning {__version__}, jax {jax.__version__}",
        *(f"--{name} {value}" for name, value in sorted(given.items())),
        *relevant_lines(gin_files.bound_config()),
    ]
