"""`prompt-tuning verify`: repeats a run and compares the bits."""

import argparse
from pathlib import Path

from prompt_tuning.cli.option_types import numeric
from prompt_tuning.cli.run_options import find_run_directory
from prompt_tuning.cli.shared_options import refuse_bindings
from prompt_tuning.core.number_ranges import PositiveInteger

HELP = "repeat a run, and tell whether the bits are the same"
HEADING = "Evaluate and use"
USES_JAX = True
SAME, DIFFERENT = 0, 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("run", metavar="RUN", help="run directory, which is only read")
    parser.add_argument(
        "--steps",
        type=numeric(PositiveInteger),
        metavar="N",
        help="compare up to this step only (default: all recorded steps)",
    )
    parser.add_argument(
        "--allow_gin_imports",
        action="store_true",
        help="run the Python modules that the config imports or names as rewards; do "
        "this only for configs you trust",
    )


def check(options: argparse.Namespace) -> None:
    """Checks that there are no bindings and the directory is a run's."""
    refuse_bindings(options)
    find_run_directory(options.run)


def run(options: argparse.Namespace) -> int:
    """Repeats the run; returns 0 if all bits are the same, 1 otherwise."""
    import tempfile

    from rich.console import Console

    from prompt_tuning.cli.console import print_lines
    from prompt_tuning.cli.selected_run import check_rewards
    from prompt_tuning.config.gin_files import read_run_directory
    from prompt_tuning.training.progress import make_reporter
    from prompt_tuning.training.provenance import check_provenance
    from prompt_tuning.training.verification import steps_to_verify, verify_run

    console, directory = Console(), find_run_directory(options.run)
    trusted = options.allow_gin_imports
    settings = read_run_directory(directory, allow_imports=trusted)
    if not trusted:
        check_rewards(settings)
    differing = check_provenance(settings)
    recorded = steps_to_verify(directory, options.steps)
    print_lines(console, *(f"warning: {line}" for line in differing))
    with tempfile.TemporaryDirectory(prefix="prompt_tuning_") as folder:
        found = verify_run(
            settings,
            Path(folder) / "run",
            recorded,
            lambda done: make_reporter(console, max(recorded), done),
        )
    if found.difference is not None:
        print_lines(console, f"different: {found.difference}")
        return DIFFERENT
    print_lines(
        console,
        f"same: {directory} has the same bits after step {found.step} "
        f"({found.compared} fingerprints compared)",
    )
    return SAME
