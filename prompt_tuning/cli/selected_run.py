"""The run that a command's options select."""

import argparse
import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

import jax

from prompt_tuning import processes
from prompt_tuning.cli.run_options import (
    OptionsConfig,
    find_run_directory,
    given_config,
)
from prompt_tuning.config import gin_files, operative_config
from prompt_tuning.config.config_changes import relevant_lines
from prompt_tuning.config.parsed_config import GivenConfig
from prompt_tuning.config.run import Run
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.version import __version__
from prompt_tuning.data.source_reading import has_pairs, reads_text
from prompt_tuning.settings.mesh_shape import MeshShape
from prompt_tuning.training.epochs import steps_of_epochs
from prompt_tuning.training.rollouts.rewards import runs_module
from prompt_tuning.tuned.adapter_texts import AdapterTextSettings, with_texts_of
from prompt_tuning.tuned.prediction import label_settings

PROCESS_OPTIONS = (
    *("coordinator", "process", "gin_file", "bindings", "run"),
    *("texts", "inputs", "output", "checked_config"),
)
"""Options that may differ between processes.

They are paths of files with the same contents, and values that process 0 sends to the
others.
"""


def read_run(
    options: argparse.Namespace,
    bindings: Sequence[str] = (),
    directory: str | None = None,
    *,
    trains: bool = False,
    allow_unused: bool = False,
) -> Run:
    """Reads the run of `--run`, of the gin files, or of the options alone.

    With `--prompt`, the run reads texts as that prompt or adapter does. `directory`
    overrides the config's. With `trains`, the command trains the run, or opens it as
    training does. With `allow_unused`, bindings may set parameters that the run does
    not use.

    Raises:
      InputError: if the directory is not a run's, or the config cannot be used or
        contradicts the prompt.
    """
    prompts = getattr(options, "prompts", None) or [getattr(options, "prompt", None)]
    # Before the run, because the last config that is read stays in use.
    settings = [AdapterTextSettings.read(path) for path in prompts if path is not None]
    run = _read_run(
        options, bindings, directory, trains=trains, allow_unused=allow_unused
    )
    return with_texts_of(run, settings) if settings else run


def _read_run(
    options: argparse.Namespace,
    bindings: Sequence[str],
    directory: str | None,
    *,
    trains: bool,
    allow_unused: bool,
) -> Run:
    """Reads a run; see `read_run`."""
    folder, imports = getattr(options, "run", None), options.allow_gin_imports
    checked = getattr(options, "checked_config", None)

    def read(steps: int | None = None) -> tuple[OptionsConfig, GivenConfig]:
        config = given_config(options, bindings, directory, trains=trains, steps=steps)
        return config, config.read(allow_imports=imports)

    def build(given: GivenConfig) -> Run:
        run = gin_files.build_run(given, directory, allow_unused=allow_unused)
        if folder is None:
            return run
        # The directory may have been moved since the run wrote its config.
        return dataclasses.replace(run, directory=str(find_run_directory(folder)))

    # The check reads the config of the options alone.
    alone = not bindings and directory is None
    config, given = checked if alone and checked is not None else read()
    run = build(given)
    if trains and not imports:
        check_rewards(run, getattr(options, "reward", None) or [])
    if config.epochs is None:
        return run
    return build(read(steps_of_epochs(run, config.epochs))[1])


def check_rewards(run: Run, typed: Sequence[str] = ()) -> None:
    """Checks that no module is imported for a reward that only the config names."""
    for reward in [] if run.rollouts is None else run.rollouts.rewards:
        if runs_module(reward) and reward not in typed:
            raise InputError(
                f"the config names the reward {shown(reward)}, which runs code of a "
                "module. If you trust it as you trust a program, give "
                "--allow_gin_imports"
            )


@dataclasses.dataclass(frozen=True)
class NextCommand:
    """The command to use a run with after training, for labels, texts or vectors."""

    command: str
    arguments: str

    @classmethod
    def of(cls, run: Run) -> "NextCommand":
        """Chooses the command by the run's data; may read the first record."""
        if run.objective is not None and run.objective.embeds is not None:
            return cls("evaluate", "--baseline")
        if label_settings(run) is not None or run.tuning.class_head is not None:
            return cls("predict", "FILE")
        chat = reads_text(run.source) and not has_pairs(run.source)
        return cls("generate", "--chat TEXT" if chat else "TEXT")

    def line(self, directory: str | Path) -> str:
        """Returns a message with the command, for a run directory."""
        folder = shlex.quote(str(directory))
        return f"next: prompt-tuning {self.command} --run {folder} {self.arguments}"


def check_processes(options: argparse.Namespace, run: Run) -> None:
    """Checks that all processes can share the run, before the model is read.

    Raises:
      InputError: on every process, if they were given different configs or options, or
        the run has no mesh.
    """
    count = processes.count()
    if count == 1:
        return
    processes.check_same("settings", lambda: _settings(options))
    if run.mesh is None:
        raise InputError(
            f"{count} processes were started, but Run.mesh is None, so each would do "
            "all of the work: set --gin.Run.mesh='@MeshShape()'"
        )


def _settings(options: argparse.Namespace) -> list[str]:
    """One line for each setting that must be the same in every process."""
    shared = {k: x for k, x in vars(options).items() if k not in PROCESS_OPTIONS}
    return [
        f"prompt_tuning {__version__}, jax {jax.__version__}",
        *(f"--{name} {value}" for name, value in sorted(shared.items())),
        *relevant_lines(operative_config.bound_config()),
    ]


def report_idle_devices(mesh: MeshShape | None) -> list[str]:
    """Returns a line with the number of devices that a run leaves idle, if any."""
    devices = jax.device_count()
    if mesh is not None or devices == 1:
        return []
    return [
        f"{devices - 1} of {devices} devices are idle: --gin.Run.mesh='@MeshShape()' "
        "splits each batch among all of them"
    ]


def print_config() -> None:
    """Prints the config of the last run that was read."""
    if processes.is_first():
        print(operative_config.complete_config(), end="")
