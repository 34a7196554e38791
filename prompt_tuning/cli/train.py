"""`prompt-tuning train`: trains a run, or resumes it."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from prompt_tuning.cli import automatic_method, shared_options
from prompt_tuning.cli.finished_page import add_page_option, write_finished_page
from prompt_tuning.cli.option_types import duration
from prompt_tuning.cli.run_options import add_run_options, check_options
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.interrupts import INTERRUPTED

if TYPE_CHECKING:
    from rich.console import Console

    from prompt_tuning.config.run import Run

HELP = "train a prompt or adapter, or continue an interrupted run"
USES_JAX = True
SEVERAL_PROCESSES = True
RESUMES = True
USAGE = """
  prompt-tuning train --model PATH --train FILE [--eval FILE] [OPTION ...]
  prompt-tuning train --gin_file FILE [--gin.NAME=VALUE ...] [OPTION ...]
  prompt-tuning train --run DIRECTORY [--steps N] [OPTION ...]"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.usage = USAGE
    shared_options.add_config_option(parser)
    parser.add_argument(
        "--run",
        metavar="DIRECTORY",
        help="continue the run in this directory with its config; other options, e.g. "
        "more --steps, may change only what does not affect what it has learned",
    )
    parser.add_argument(
        "--profile",
        metavar="DIR",
        type=Path,
        help="write a trace of steps 3 to 5 to this folder, for TensorBoard or "
        "Perfetto",
    )
    add_page_option(parser)
    parser.add_argument(
        "--budget",
        type=duration,
        metavar="TIME",
        help="time limit for trying methods with --method auto, e.g. 90s, 5m or 1h "
        "(default: 5m)",
    )
    shared_options.add_print_config_option(parser)
    shared_options.add_dry_run_option(parser)
    add_run_options(parser)


def check(options: argparse.Namespace) -> None:
    """Checks for missing and contradictory options."""
    if options.method == automatic_method.AUTO:
        automatic_method.check(options)
    elif options.budget is not None:
        raise InputError("--budget has no effect: it is the time of --method auto")
    else:
        check_options(options, trains=True)


def run(options: argparse.Namespace) -> int:
    """Trains until the run is finished or a signal stops it."""
    from rich.console import Console

    from prompt_tuning.processes.group import is_first

    console = Console(quiet=not is_first())
    if options.method == automatic_method.AUTO:
        if options.dry_run:
            automatic_method.print_plan(options, console)
            return 0
        try:
            options = automatic_method.choose(options, console)
        except KeyboardInterrupt:
            return INTERRUPTED
    return _run_method(options, console)


def _run_method(options: argparse.Namespace, console: "Console") -> int:
    """Trains the method named in the options."""
    from prompt_tuning.cli.console import print_lines
    from prompt_tuning.cli.selected_run import (
        NextCommand,
        check_processes,
        print_config,
        read_run,
        report_idle_devices,
    )
    from prompt_tuning.config import operative_config
    from prompt_tuning.processes.group import is_first, run_on_first
    from prompt_tuning.training.loop import train_held
    from prompt_tuning.training.opening import open_run
    from prompt_tuning.training.progress import make_reporter
    from prompt_tuning.training.run_directory import check_resumable, hold_run
    from prompt_tuning.tuned.load_tuned import where_trained

    run = read_run(options, trains=True)
    if options.print_config:
        print_config()
        return 0
    check_processes(options, run)
    if options.dry_run:
        _print_plan(console, run)
        return 0
    # Hold the directory from here on: a second command is refused before it reads the
    # model.
    with hold_run(run.directory):
        run_on_first(lambda: check_resumable(run, operative_config.complete_config()))
        trainer = open_run(run)
        # Now, because the data files may be gone when training ends.
        next_command = NextCommand.of(run)
        print_lines(console, trainer.report(), *report_idle_devices(run.mesh))
        outcome = train_held(
            trainer,
            config=operative_config.operative_config(),
            record={"xla_flags": os.environ.get("XLA_FLAGS", "")},
            make_reporter=lambda done: make_reporter(console, run.steps, done),
            profile=options.profile,
        )
    if outcome.finished:
        how = "done" if outcome.reason is None else "stopped early"
        print_lines(
            console,
            f"{how}; the run is in {run.directory}",
            run_on_first(lambda: where_trained(run, outcome.trained)),
            next_command.line(run.directory),
        )
        if not options.no_report and is_first():
            write_finished_page(console, Path(run.directory))
    return INTERRUPTED if outcome.interrupted else 0


def _print_plan(console: "Console", run: "Run") -> None:
    """Opens and checks everything without training or writing."""
    from prompt_tuning.cli.console import print_lines
    from prompt_tuning.cli.selected_run import report_idle_devices
    from prompt_tuning.config import operative_config
    from prompt_tuning.processes.group import run_on_first
    from prompt_tuning.training.opening import open_run
    from prompt_tuning.training.run_directory import check_owner

    trainer = open_run(run)
    print_lines(console, trainer.report(), *report_idle_devices(run.mesh))
    directory, config = Path(run.directory), operative_config.operative_config()
    model = trainer.fingerprint
    run_on_first(lambda: check_owner(directory, config, model))
    print_lines(console, "dry run: no step was taken and nothing was written")
