"""`prompt-tuning report`: writes a page that tells whether runs worked."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from prompt_tuning.cli.run_options import EVALUATES, add_run_options, check_options
from prompt_tuning.cli.runs import find_runs
from prompt_tuning.cli.shared_options import add_config_option
from prompt_tuning.core.atomic_files import check_replaceable, write_file
from prompt_tuning.core.errors import InputError

if TYPE_CHECKING:
    from prompt_tuning.report.measurement import Measurement
    from prompt_tuning.report.recorded_run import RecordedRun

HELP = "write a page that tells whether runs worked, and why"
HEADING = "Evaluate and use"
USES_JAX = True
USAGE = "\n  prompt-tuning report RUN [RUN ...] --output report.html [OPTION ...]"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.usage = USAGE
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="run directories, or folders of them, such as a sweep",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="the page, one HTML file that needs no network (default: report.html)",
    )
    parser.add_argument(
        "--recorded",
        action="store_true",
        help="show only what is in the run directories: models are not opened, and "
        "nothing is compared with using no prompt",
    )
    parser.add_argument(
        "--text_prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="compare with the frozen model that reads this text before each input, "
        "too; may be repeated",
    )
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    add_config_option(parser)
    add_run_options(parser, EVALUATES)


def check(options: argparse.Namespace) -> None:
    """Checks for missing and contradictory options."""
    if options.recorded and options.text_prompt:
        raise InputError("--recorded measures nothing, so leave --text_prompt out")
    check_replaceable(options.output, force=options.force)
    for directory in _directories(options):
        check_options(_of_run(options, directory), trains=False)


def run(options: argparse.Namespace) -> int:
    """Writes the page; prints each run's verdict and the page's path."""
    from rich.console import Console

    from prompt_tuning.cli.console import print_lines
    from prompt_tuning.prompts.tools.similarity import short_names
    from prompt_tuning.report.page import render_page
    from prompt_tuning.report.recorded_run import RecordedRun
    from prompt_tuning.report.run_view import ReportedRun

    directories = _directories(options)
    names = [str(directories[0])] if len(directories) == 1 else short_names(directories)
    console, runs = Console(), []
    for name, directory in zip(names, directories, strict=True):
        recorded = RecordedRun.read(directory)
        measured = _measure(options, recorded)
        runs.append(ReportedRun(name, recorded, measured))
        print_lines(console, f"{name}: {runs[-1].verdict.sentence}")
    write_file(options.output, render_page(runs), force=options.force)
    print_lines(console, f"page: {options.output}")
    return 0


def _directories(options: argparse.Namespace) -> list[Path]:
    directories = list(find_runs(options.runs))
    if not directories:
        names = ", ".join(map(str, options.runs))
        raise InputError(f"there is no run in {names}: no folder has a config.gin")
    return directories


def _of_run(options: argparse.Namespace, directory: Path) -> argparse.Namespace:
    """Returns the options as a command for a single run would have them."""
    return argparse.Namespace(**{**vars(options), "run": str(directory)})


def _measure(
    options: argparse.Namespace, recorded: "RecordedRun"
) -> "Measurement | None":
    """Measures a run's model, if possible and requested."""
    from prompt_tuning.cli.selected_run import read_run
    from prompt_tuning.report.measurement import measure_run

    if options.recorded or recorded.checkpoint is None:
        return None
    run = read_run(_of_run(options, recorded.directory))
    return measure_run(run, text_prompts=options.text_prompt)
