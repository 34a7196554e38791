"""The page that `train` and `sweep` write at the end."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prompt_tuning.core.errors import InputError, StorageError

if TYPE_CHECKING:
    from rich.console import Console

REPORT_FILE = "report.html"


def add_page_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--no_report`."""
    parser.add_argument(
        "--no_report",
        action="store_true",
        help=f"do not write {REPORT_FILE}, a page of curves and checks, at the end",
    )


def write_finished_page(
    console: "Console", directory: Path, members: Sequence[Path] = ()
) -> None:
    """Writes the page about a run directory, and prints its path.

    The model is not opened, so a short run is not slowed down. A failure is only
    reported, because the run itself has succeeded. The page replaces an older
    one; members that were never saved are skipped.
    """
    from prompt_tuning.cli.console import print_lines
    from prompt_tuning.config.config_values import CONFIG_FILE
    from prompt_tuning.core.atomic_files import write_file
    from prompt_tuning.report.page import render_page
    from prompt_tuning.report.recorded_run import RecordedRun
    from prompt_tuning.report.run_view import ReportedRun

    folders = [each for each in members if (each / CONFIG_FILE).is_file()]
    names = [each.name for each in folders] or [str(directory)]
    try:
        runs = [
            ReportedRun(name, RecordedRun.read(folder), None)
            for name, folder in zip(names, folders or [directory], strict=True)
        ]
        write_file(directory / REPORT_FILE, render_page(runs), force=True)
    except (InputError, StorageError) as problem:
        print_lines(console, f"no page was written: {problem}")
    else:
        print_lines(console, f"page: {directory / REPORT_FILE}")
