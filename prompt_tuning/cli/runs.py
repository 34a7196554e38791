"""`prompt-tuning runs`: lists run directories with their steps and best metric."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prompt_tuning.cli.shared_options import refuse_bindings
from prompt_tuning.config.config_values import CONFIG_FILE
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.metric_directions import (
    AUTO,
    DIRECTIONS,
    LOSS,
    metric_and_direction,
)

HELP = "list runs with their steps and best metric"
USES_JAX = False

PATTERNS = (CONFIG_FILE, f"*/{CONFIG_FILE}", f"*/*/{CONFIG_FILE}")
"""Where to look for runs: in a folder and two levels below, as in a sweep."""

Log = Sequence[Mapping[str, int | float]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "folders",
        nargs="*",
        type=Path,
        default=[Path("runs")],
        metavar="FOLDER",
        help="run directories, or folders of them, such as a sweep (default: runs)",
    )
    parser.add_argument(
        "--keep_best",
        choices=DIRECTIONS,
        metavar="METRIC",
        help="show the best value of this metric (default: the metric that chose the "
        "run's best checkpoint)",
    )


def run(options: argparse.Namespace) -> int:
    """Prints a table of all runs."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from prompt_tuning.cli.console import print_table

    refuse_bindings(options)
    directories = list(find_runs(options.folders))
    if not directories:
        names = ", ".join(map(str, options.folders))
        raise InputError(f"there is no run in {names}: no folder has a {CONFIG_FILE}")
    table = Table("run", "model", "trains", "steps", "best")
    for directory in directories:
        try:
            cells = describe(directory, options.keep_best)
        except InputError as problem:
            cells = ("", "", "", f"cannot be read: {problem}")
        table.add_row(escape(str(directory)), *map(escape, cells))
    print_table(Console(), table)
    return 0


def find_runs(folders: Sequence[Path]) -> Iterator[Path]:
    """Yields the run directories in folders, without repetition.

    Raises:
      InputError: if a folder does not exist.
    """
    found: set[Path] = set()
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"the folder {folder} does not exist")
        for pattern in PATTERNS:
            found |= {config.parent for config in folder.glob(pattern)}
    yield from sorted(found)


def describe(directory: Path, metric: str | None = None) -> tuple[str, str, str, str]:
    """Returns a run's model, methods, steps and best metric.

    Raises:
      InputError: if the config or the log cannot be read.
    """
    from prompt_tuning.config.parsed_config import read_values
    from prompt_tuning.training.metrics_log import METRICS_FILE, read_log

    values = read_values(str(directory / CONFIG_FILE))
    settings = values.get("Run", {})
    chosen = metric or settings.get("keep_best", AUTO)
    labels = values.get("Evaluation", {}).get("labels")
    file = directory / METRICS_FILE
    log = read_log(file) if file.is_file() else []
    done = max((line["step"] for line in log), default=0)
    return (
        str(values.get("Pretrained", {}).get("checkpoint", "")),
        _trained(settings),
        f"{done:,} of {settings.get('steps', 0):,}",
        _best(log, metric_and_direction(chosen, labels) or (LOSS, "min"), metric),
    )


def _trained(settings: Mapping[str, Any]) -> str:
    parts = [settings.get("prompt"), settings.get("decoder_prompt")]
    parts += settings.get("adapters") or ()
    return ", ".join(str(part).strip("@()") for part in parts if part is not None)


def _best(log: Log, keep_best: Sequence[str], asked: str | None) -> str:
    """Returns the best value of a metric, or else the last loss, with its step."""
    from prompt_tuning.training.metrics_log import EVALUATION

    metric, direction = keep_best
    name = f"{EVALUATION}{metric}"
    measured = [(line[name], line["step"]) for line in log if name in line]
    if measured:
        sign = 1 if direction == "min" else -1
        value, step = min(measured, key=lambda pair: (sign * pair[0], pair[1]))
        return f"{metric} {value:.4g} at step {step:,}"
    if asked:
        return f"{asked} was not measured"
    losses = [(line["loss"], line["step"]) for line in log if "loss" in line]
    if not losses:
        return ""
    value, step = losses[-1]
    return f"training loss {value:.4g} at step {step:,}"
