"""The run that a command is about, from its options."""

import argparse
import dataclasses
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
        files.insert(0, str(config))
    run = configuration.read_run(files, options.bindings)
    # The directory may have been moved since the run wrote its config.
    return (
        run if directory is None else dataclasses.replace(run, directory=str(directory))
    )
