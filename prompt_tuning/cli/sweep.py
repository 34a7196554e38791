"""The command `prompt-tuning sweep`: from configs that vary to a table of members."""

import argparse
import functools
import importlib.util
import os
from pathlib import Path

from rich.console import Console

from prompt_tuning.cli.run_options import idle_devices
from prompt_tuning.cli.variations import SHAPE, Variation, parse_variations
from prompt_tuning.config import gin_files
from prompt_tuning.config.run import Run
from prompt_tuning.core.errors import InputError
from prompt_tuning.sweep.sweep_loop import train_sweep
from prompt_tuning.sweep.sweep_run import (
    OpenedMember,
    Sweep,
    check_compatible,
    prepare_sweep,
)
from prompt_tuning.sweep.sweep_summary import summarize, summary_table, write_summary
from prompt_tuning.training.finite_checks import NotFiniteError
from prompt_tuning.training.progress import make_reporter
from prompt_tuning.training.run_plan import plan_run

WIDE = 200


def sweep(options: argparse.Namespace) -> int:
    """Tunes many prompts at once, or goes on with a sweep that was stopped."""
    prepared = prepare(options)
    console = Console()
    for text in (prepared.report(), *idle_devices(prepared.run)):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    outcome = train_sweep(
        prepared,
        record={"xla_flags": os.environ.get("XLA_FLAGS", "")},
        make_reporter=lambda done: make_reporter(console, prepared.run.steps, done),
    )
    _show(console, prepared)
    if len(outcome.diverged) == len(prepared.members):
        name, why = list(outcome.diverged.items())[-1]
        raise NotFiniteError(
            f"none of the {len(prepared.members)} members came through; {name}: {why}"
        )
    return 0


def prepare(options: argparse.Namespace) -> Sweep:
    """The sweep that the arguments describe, checked and ready to step.

    Raises:
      InputError: if something cannot be used.
    """
    if not options.vary:
        raise InputError(f"nothing varies; say what does: {SHAPE}")
    if options.at_once is not None and options.at_once < 1:
        raise InputError(f"--at_once is {options.at_once}, expected at least 1")
    variations = parse_variations(options.vary)
    read = functools.partial(_read, options)
    # All are read and compared before the first model is opened.
    directory = Path(read(variations[0]).directory)
    check_compatible({v.name: read(v, directory) for v in variations})
    members = []
    for variation in variations:
        # Opened while its config is the one that gin holds: prompts are built by it.
        opened = plan_run(read(variation, directory))
        config = gin_files.operative_config()
        members.append(OpenedMember(variation.name, variation.varies, opened, config))
    return prepare_sweep(directory, members, options.at_once)


def _read(
    options: argparse.Namespace, variation: Variation, directory: Path | None = None
) -> Run:
    """A member's run, in its place below the sweep's directory if that is known."""
    place = None if directory is None else (directory / variation.name).as_posix()
    lines = [*options.bindings, *variation.lines]
    return gin_files.read_run(options.gin_file, lines, place)


def _show(console: Console, prepared: Sweep) -> None:
    """Writes what the sweep came to, and prints it."""
    directory = prepared.directory
    say = functools.partial(
        console.print, markup=False, highlight=False, soft_wrap=True
    )
    summary = summarize(prepared)
    write_summary(directory, summary)
    # A file or a pipe has no width, and a table is not to be cut for it.
    (console if console.is_terminal else Console(width=WIDE)).print(
        summary_table(summary)
    )
    if importlib.util.find_spec("matplotlib") is None:
        say("no curves were drawn: pip install 'prompt-tuning[plots]' draws them")
    elif any(result.log for result in summary.results):
        from prompt_tuning.sweep.sweep_plot import CURVES_FILE, plot_curves

        plot_curves(summary, directory / CURVES_FILE)
        say(f"curves: {directory / CURVES_FILE}")
    if summary.best is not None:
        say(f"best: {directory / summary.best}")
        say(f"next: prompt-tuning generate --run {directory / summary.best} TEXT")
