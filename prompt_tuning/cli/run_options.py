"""The run that a command is about, from its options."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from prompt_tuning import configuration
from prompt_tuning.errors import InputError
from prompt_tuning.run import Run
from prompt_tuning.training.run_directory import CONFIG_FILE
from prompt_tuning.training.sweep_summary import best_member


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
    return configuration.read_run(files, options.bindings)


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
    run = configuration.read_run([config, *files], bindings)
    # The directory may have been moved since the run wrote its config.
    return dataclasses.replace(run, directory=str(directory))
