"""The run that the options of a command select."""

import argparse
from pathlib import Path

import jax

from prompt_tuning import __version__, processes
from prompt_tuning.config import gin_files, values_in_use
from prompt_tuning.config.run import CONFIG_FILE, Run
from prompt_tuning.core.errors import InputError
from prompt_tuning.sweep.sweep_summary import best_member
from prompt_tuning.training.run_directory import relevant_lines

PROCESS_OPTIONS = ("coordinator", "process", "texts", "gin_file", "bindings", "run")
"""Options that may differ between processes: paths of files with the same contents, and
values that process 0 sends to the others."""


def read_run(options: argparse.Namespace) -> Run:
    """Reads the run of `--run`, or of the gin files.

    Raises:
      InputError: if the directory is not a run's, or the config cannot be used.
    """
    files, imports = list(options.gin_file), options.allow_gin_imports
    if options.run is None:
        return gin_files.read_run(files, options.bindings, allow_imports=imports)
    directory = best_member(Path(options.run)) or Path(options.run)
    if not (directory / CONFIG_FILE).exists():
        raise InputError(
            f"{directory} has no {CONFIG_FILE}, so it is not a run directory"
        )
    return gin_files.read_run_directory(
        directory, options.bindings, files, allow_imports=imports
    )


def check_processes(options: argparse.Namespace, run: Run) -> None:
    """Checks that all processes can share the run.

    Call it before the model is read.

    Raises:
      InputError: on every process, if they were given different configs or options, or
        the run has no mesh.
    """
    processes.check_same("settings", lambda: _settings(options))
    count = processes.count()
    if run.mesh is None and count > 1:
        raise InputError(
            f"{count} processes were started, but Run.mesh is None, so each would do "
            "all of the work: set --gin.Run.mesh=@MeshShape()"
        )


def _settings(options: argparse.Namespace) -> list[str]:
    """One line for each setting that must be the same in every process."""
    shared = {k: x for k, x in vars(options).items() if k not in PROCESS_OPTIONS}
    return [
        f"prompt_tuning {__version__}, jax {jax.__version__}",
        *(f"--{name} {value}" for name, value in sorted(shared.items())),
        *relevant_lines(values_in_use.bound_config()),
    ]


def report_idle_devices(run: Run) -> list[str]:
    """Returns a line with the number of devices that the run leaves idle, if any."""
    devices = jax.device_count()
    if run.mesh is not None or devices == 1:
        return []
    return [
        f"{devices - 1} of {devices} devices are idle: --gin.Run.mesh=@MeshShape() "
        "splits each batch among all of them"
    ]


def print_config() -> None:
    """Prints the config of the run that was read last."""
    if processes.is_first():
        print(values_in_use.complete_config(), end="")
