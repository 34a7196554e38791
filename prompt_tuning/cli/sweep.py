"""`prompt-tuning sweep`: trains many prompts together and compares them."""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from prompt_tuning.cli import shared_options
from prompt_tuning.cli.finished_page import add_page_option, write_finished_page
from prompt_tuning.cli.option_types import numeric
from prompt_tuning.cli.run_options import add_run_options, check_options
from prompt_tuning.cli.variations import SHAPE, Variation, parse_variations
from prompt_tuning.core.errors import InputError, NotFiniteError
from prompt_tuning.core.interrupts import INTERRUPTED
from prompt_tuning.core.number_ranges import PositiveInteger

if TYPE_CHECKING:
    from rich.console import Console

    from prompt_tuning.cli.selected_run import NextCommand
    from prompt_tuning.config.run import Run
    from prompt_tuning.training.progress import Callback
    from prompt_tuning.training.sweep.sweep_run import Sweep
    from prompt_tuning.training.sweep.sweep_summary import SweepSummary
    from prompt_tuning.training.training_result import TrainingResult

HELP = "train many prompts at once over one copy of the frozen model"
USES_JAX = True
DESCRIPTION = (
    "Train K prompts at once over one copy of the frozen model with one compiled "
    "step. Each member is an ordinary run in its own directory below that of "
    "--out, followed by a table, sweep.json, curves.png and report.html. The frozen "
    "model takes the memory of one run; activations take the memory of the members "
    "computed at once. Members with the same Run.data_seed share each batch. An "
    "interrupted sweep continues when the same command is started again."
)
USAGE = """
  prompt-tuning sweep --model PATH --train FILE --vary NAME=VALUE,VALUE [OPTION ...]
  prompt-tuning sweep --gin_file FILE --vary NAME=VALUE,VALUE [OPTION ...]"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.description = DESCRIPTION
    parser.usage = USAGE
    shared_options.add_config_option(parser)
    add_page_option(parser)
    shared_options.add_print_config_option(parser)
    shared_options.add_dry_run_option(parser)
    parser.add_argument(
        "--at_once",
        type=numeric(PositiveInteger),
        metavar="N",
        help="members that compute gradients together, group by group (default: all "
        "on an accelerator; on a CPU, as many as fit in its caches)",
    )
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="NAME=VALUE,VALUE,...",
        help="values that differ between members: an option "
        "(learning_rate=0.001,0.003), a macro (PROMPT_LENGTH=5,20) or a parameter "
        "(Run.seed=0,1,2); several --vary give every combination, and "
        "--vary NAME,NAME=(VALUE,VALUE),(VALUE,VALUE) changes values together",
    )
    add_run_options(parser)


def check(options: argparse.Namespace) -> None:
    """Checks for missing and contradictory options."""
    check_options(options, trains=True, varied=_variations(options)[0].lines)


def run(options: argparse.Namespace) -> int:
    """Trains all members; writes and prints their comparison."""
    from rich.console import Console

    from prompt_tuning.cli.console import print_lines
    from prompt_tuning.cli.selected_run import report_idle_devices

    options = with_steps(options)
    if options.print_config:
        return _print_configs(options)
    console = Console()
    if options.dry_run:
        sweep = prepare(options)
        print_lines(console, sweep.report(), *report_idle_devices(sweep.run.mesh))
        print_lines(console, "dry run: no step was taken and nothing was written")
        return 0
    outcome = train_members(options, console)
    _show_results(console, outcome)
    if not (options.no_report or outcome.result.interrupted):
        members = [Path(member.directory) for member in outcome.sweep.members]
        write_finished_page(console, outcome.sweep.directory, members)
    diverged = outcome.diverged
    if len(diverged) == len(outcome.sweep.members):
        name, why = list(diverged.items())[-1]
        raise NotFiniteError(f"all {len(diverged)} members diverged; {name}: {why}")
    return INTERRUPTED if outcome.result.interrupted else 0


class Outcome(NamedTuple):
    """The result of a sweep."""

    sweep: "Sweep"
    result: "TrainingResult"
    diverged: Mapping[str, str]
    summary: "SweepSummary"
    next_command: "NextCommand"


def train_members(
    options: argparse.Namespace,
    console: "Console",
    callbacks: Sequence["Callback"] = (),
) -> Outcome:
    """Trains all members, and writes their comparison.

    Callbacks are called with a step and its logged metrics. If one returns True, all
    members save and stop.
    """
    from prompt_tuning.cli.console import print_lines
    from prompt_tuning.cli.selected_run import NextCommand, report_idle_devices
    from prompt_tuning.training.progress import make_reporter
    from prompt_tuning.training.run_directory import hold_run
    from prompt_tuning.training.sweep.sweep_run import train_sweep
    from prompt_tuning.training.sweep.sweep_summary import summarize, write_summary

    variations = _variations(options)
    name = _read_member(options, variations[0]).directory
    members = [Path(name, variation.name) for variation in variations if name]
    # Hold the directory from here on: a second command is refused before it reads the
    # model.
    with hold_run(name, *members):
        sweep = prepare(options)
        next_command = NextCommand.of(sweep.run)
        print_lines(console, sweep.report(), *report_idle_devices(sweep.run.mesh))
        result, diverged = train_sweep(
            sweep,
            record={"xla_flags": os.environ.get("XLA_FLAGS", "")},
            make_reporter=lambda done: make_reporter(console, sweep.run.steps, done),
            callbacks=callbacks,
        )
        summary = summarize(sweep)
        write_summary(sweep.directory, summary)
    return Outcome(sweep, result, diverged, summary, next_command)


def prepare(options: argparse.Namespace) -> "Sweep":
    """Opens and checks the sweep that the options describe."""
    from prompt_tuning.config import operative_config
    from prompt_tuning.training.member_checks import check_compatible
    from prompt_tuning.training.opening import open_members
    from prompt_tuning.training.run_plan import plan_run
    from prompt_tuning.training.sweep.sweep_run import Sweep, SweepMember

    variations = _variations(options)
    # Read and compare all configs before the first model is opened.
    directory = Path(_read_member(options, variations[0]).directory)
    runs, unused = {}, []
    for variation in variations:
        runs[variation.name] = _read_member(options, variation, directory)
        bindings = [*options.bindings, *variation.lines]
        unused.append(operative_config.unused_bindings(bindings))
    everywhere = set.intersection(*map(set, unused))
    operative_config.check_used(
        {k: why for k, why in unused[0].items() if k in everywhere}
    )
    check_compatible(runs)
    plans, configs = {}, {}
    for variation in variations:
        # Open each member while gin holds its config: gin builds its prompt.
        run = _read_member(options, variation, directory)
        plans[variation.name] = plan_run(run)
        configs[variation.name] = operative_config.operative_config()
    trainers = open_members(plans, at_once=options.at_once)
    members = [
        SweepMember(each.name, each.varies, trainer, configs[each.name])
        for each, trainer in zip(variations, trainers, strict=True)
    ]
    return Sweep(directory, tuple(members))


def with_steps(options: argparse.Namespace) -> argparse.Namespace:
    """Replaces `--epochs` by a number of steps, which all members share."""
    from prompt_tuning.training.epochs import count_steps
    from prompt_tuning.training.run_plan import plan_run

    if options.epochs is None:
        return options
    in_steps = argparse.Namespace(**{**vars(options), "epochs": None})
    plans = [plan_run(_read_member(in_steps, each)) for each in _variations(options)]
    # All batches are planned for the longest prompt.
    longest = max(plans, key=lambda plan: plan.model.prompt_length)
    in_steps.steps = count_steps(longest, options.epochs)
    return in_steps


def _variations(options: argparse.Namespace) -> Sequence[Variation]:
    if not options.vary:
        raise InputError(f"nothing varies; give what differs: {SHAPE}")
    return parse_variations(options.vary)


def _read_member(
    options: argparse.Namespace, variation: Variation, directory: Path | None = None
) -> "Run":
    """Reads a member's run; with the sweep's directory, the member's is below it."""
    from prompt_tuning.cli.selected_run import read_run

    member_directory = (
        None if directory is None else (directory / variation.name).as_posix()
    )
    # A binding may be used by some members only; see `prepare`.
    return read_run(
        options, variation.lines, member_directory, trains=True, allow_unused=True
    )


def _print_configs(options: argparse.Namespace) -> int:
    """Prints the config of each member, after a comment with its name."""
    from prompt_tuning.cli.selected_run import print_config

    variations = _variations(options)
    directory = Path(_read_member(options, variations[0]).directory)
    for variation in variations:
        _read_member(options, variation, directory)
        print(f"# Member {variation.name}")
        print_config()
    return 0


def _show_results(console: "Console", outcome: Outcome) -> None:
    """Writes the curves, and prints the table."""
    import importlib.util

    from prompt_tuning.cli.console import print_lines, print_table
    from prompt_tuning.training.sweep.sweep_summary import summary_table
    from prompt_tuning.tuned.load_tuned import where_trained

    sweep, summary = outcome.sweep, outcome.summary
    directory = sweep.directory
    print_table(console, summary_table(summary))
    if importlib.util.find_spec("matplotlib") is None:
        print_lines(
            console,
            "no curves were drawn: `pip install matplotlib` enables them",
        )
    elif any(result.log for result in summary.results):
        from prompt_tuning.training.sweep.sweep_plot import CURVES_FILE, plot_curves

        plot_curves(summary, directory / CURVES_FILE)
        print_lines(console, f"curves: {directory / CURVES_FILE}")
    if summary.best is not None:
        best = directory / summary.best
        member = next(m for m in sweep.members if m.name == summary.best).trainer
        print_lines(
            console,
            f"best: {best}",
            where_trained(member.run, member.start.trained),
            outcome.next_command.line(best),
        )
