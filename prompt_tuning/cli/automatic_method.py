"""`train --method auto`: short sweeps of a few methods, then a run of the best one."""

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prompt_tuning.cli import launch, sweep
from prompt_tuning.cli.run_options import check_options, given_choices
from prompt_tuning.config.flat_option import METHOD
from prompt_tuning.config.flat_options import BESIDE
from prompt_tuning.config.option_checks import default_directory
from prompt_tuning.config.options import OPTIONS
from prompt_tuning.core.atomic_files import replace_file, reporting_disk_errors
from prompt_tuning.core.errors import InputError
from prompt_tuning.training.sweep.candidates import (
    BUDGET,
    CHOICE_FILE,
    EVALUATIONS,
    FOLDER,
    METHODS,
    SHARE,
    candidate_rates,
    candidate_steps,
    chosen_before,
    winner,
)

if TYPE_CHECKING:
    from rich.console import Console

    from prompt_tuning.training.sweep.sweep_summary import SweepSummary

AUTO = "auto"
SCHEDULE = "linear"
"""Default schedule of the candidates and of the run."""


def check(options: argparse.Namespace) -> None:
    """Checks that the options leave something to choose and to compare."""
    if options.gin_file or options.run is not None:
        raise InputError(
            "--method auto is for runs without a config: give --model, --train and "
            "--eval, or leave it out"
        )
    if options.print_config:
        raise InputError(
            "--print_config prints the config of one method, and --method auto has not "
            "chosen yet: name the method"
        )
    if launch.is_one_of_several(options):
        raise InputError(
            "--method auto compares methods in one process: choose there, then give "
            "the method to all processes"
        )
    choices = given_choices(options)
    if choices.get("eval") is None:
        raise InputError(
            "--method auto compares methods by held-out data: give --eval FILE"
        )
    for name in choices:
        chosen = OPTIONS[name].group == METHOD and name not in ("method", *BESIDE)
        if chosen or name in ("learning_rate", "optimizer"):
            raise InputError(
                f"{OPTIONS[name].flag} contradicts --method auto, which chooses it: "
                "name the method too, or leave both out"
            )
    for candidate in _candidates(options):
        check_options(candidate, trains=True)


def choose(options: argparse.Namespace, console: "Console") -> argparse.Namespace:
    """Sweeps the candidates, unless done before, and returns the winner's options.

    Each method gets an equal share of the remaining budget. If its time runs out, a
    sweep is judged by the results so far. A killed command continues when repeated.

    Raises:
      InputError: if the directory has a choice made with other options.
      NotFiniteError: if all candidates diverge.
      KeyboardInterrupt: if a signal stops a sweep; its state is saved.
    """
    directory = Path(_directory(options))
    file = directory / FOLDER / CHOICE_FILE
    settings = {k: repr(x) for k, x in sorted(given_choices(options).items())}
    settings["bindings"] = repr(options.bindings)
    if file.exists():
        return _with_choice(options, *chosen_before(file, settings))
    deadline = time.monotonic() + (options.budget or BUDGET)
    summaries: dict[str, SweepSummary] = {}
    for number, candidate in enumerate(_candidates(options)):
        left = (deadline - time.monotonic()) / (len(METHODS) - number)
        if number and left <= 0:
            break
        with _leaving_out(candidate, console):
            measured = _with_evaluations(candidate)
            summaries[candidate.method] = _sweep(measured, console, left)
    method, rate = winner(summaries)
    _print_candidates(console, summaries, (method, rate))
    choice = {"method": method, "learning_rate": rate, "given": settings}
    with reporting_disk_errors(file.parent):
        replace_file(file, json.dumps(choice, indent=1) + "\n")
    return _with_choice(options, method, rate)


def print_plan(options: argparse.Namespace, console: "Console") -> None:
    """Opens and checks every candidate without training or writing."""
    from prompt_tuning.cli.console import print_lines

    for candidate in _candidates(options):
        with _leaving_out(candidate, console):
            report = sweep.prepare(_with_evaluations(candidate)).report()
            print_lines(console, f"candidate {candidate.method}", report)
    print_lines(console, "dry run: no step was taken and nothing was written")


@contextlib.contextmanager
def _leaving_out(candidate: argparse.Namespace, console: "Console") -> Iterator[None]:
    """Reports why a model does not support a method; all support the first one."""
    from prompt_tuning.cli.console import print_lines

    try:
        yield
    except InputError as problem:
        if candidate.method == METHODS[0]:
            raise
        print_lines(console, f"candidate {candidate.method} is left out: {problem}")


def _candidates(options: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """Yields the options of each method's sweep."""
    length = {}
    if options.epochs is not None:
        length["epochs"] = options.epochs / SHARE
    else:
        steps = options.steps or OPTIONS["steps"].default
        length["steps"] = candidate_steps(steps)
    for method in METHODS:
        rates = ",".join(f"{rate:g}" for rate in candidate_rates(method))
        overrides = {
            "method": method,
            "out": str(Path(_directory(options), FOLDER, method)),
            "vary": [f"learning_rate={rates}"],
            "at_once": None,
            "schedule": options.schedule or SCHEDULE,
            **length,
        }
        yield argparse.Namespace(**{**vars(options), **overrides})


def _with_evaluations(options: argparse.Namespace) -> argparse.Namespace:
    """Evaluates candidates often enough that a budget can end their sweep."""
    options = sweep.with_steps(options)
    every = max(1, options.steps // EVALUATIONS)
    options.eval_every = min(options.eval_every or every, every)
    return options


def _directory(options: argparse.Namespace) -> str:
    return options.out or default_directory(given_choices(options))


def _sweep(
    options: argparse.Namespace, console: "Console", seconds: float
) -> "SweepSummary":
    """Trains one method's candidates until their time is up."""
    from prompt_tuning.cli.console import print_lines

    deadline = time.monotonic() + seconds
    print_lines(
        console, f"candidate {options.method}, for at most {seconds:.0f} seconds"
    )

    def over(step: int, _: Any) -> bool:
        return step >= options.eval_every and time.monotonic() > deadline

    outcome = sweep.train_members(options, console, callbacks=[over])
    if outcome.result.interrupted:
        raise KeyboardInterrupt
    return outcome.summary


def _with_choice(
    options: argparse.Namespace, method: str, rate: float
) -> argparse.Namespace:
    chosen = {
        "method": method,
        "learning_rate": rate,
        "schedule": options.schedule or SCHEDULE,
        "out": _directory(options),
    }
    return argparse.Namespace(**{**vars(options), **chosen})


def _print_candidates(
    console: "Console", summaries: dict[str, "SweepSummary"], chosen: tuple[str, float]
) -> None:
    """Prints a table of all candidates, the best one marked."""
    from rich.table import Table

    from prompt_tuning.cli.console import print_table

    metric = next(iter(summaries.values())).by[0]
    table = Table(title="candidates of --method auto", caption="* chosen")
    for name in ("", "method", "learning rate", "steps", metric):
        table.add_column(name)
    for name, summary in summaries.items():
        for result in summary.results:
            rate = result.varies["learning_rate"]
            steps = max((int(line["step"]) for line in result.log), default=0)
            value = result.best_value
            table.add_row(
                "*" if (name, float(rate)) == chosen else "",
                name,
                rate,
                str(steps),
                "-" if value is None else f"{value:.4f}",
            )
    print_table(console, table)
