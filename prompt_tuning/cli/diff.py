"""`prompt-tuning diff`: compares two checkpoints parameter by parameter."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prompt_tuning.cli.option_types import numeric
from prompt_tuning.cli.shared_options import refuse_bindings
from prompt_tuning.core.number_ranges import NonnegativeNumber

if TYPE_CHECKING:
    from rich.table import Table

    from prompt_tuning.adapters.stored_arrays import ArrayDifference

HELP = "compare two checkpoints parameter by parameter"
USES_JAX = True

CHECKPOINT = (
    "a run directory (its best checkpoint), a checkpoint, a Hugging Face or PEFT "
    "folder (quantized weights as the numbers that they stand for), a T5X checkpoint, "
    "a safetensors, .npy or .npz file, or bundled:NAME"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("first", metavar="A", help=CHECKPOINT)
    parser.add_argument("second", metavar="B", help="the checkpoint to compare it with")
    parser.add_argument(
        "--tolerance",
        type=numeric(NonnegativeNumber),
        default=0.0,
        metavar="X",
        help="absolute difference of elements up to which parameters agree",
    )
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="write all differences as JSON"
    )
    parser.add_argument(
        "--force", action="store_true", help="replace the report if it exists"
    )


def run(options: argparse.Namespace) -> int:
    """Prints the parameters that differ; returns 1 if any do."""
    from rich.console import Console

    from prompt_tuning.adapters.stored_arrays import compare_arrays, open_arrays
    from prompt_tuning.cli.console import print_lines, print_table
    from prompt_tuning.core.atomic_files import check_replaceable, write_file

    refuse_bindings(options)
    if options.report is not None:
        check_replaceable(options.report, force=options.force)
    first, second = map(find_arrays, (options.first, options.second))
    results = list(compare_arrays(open_arrays(first), open_arrays(second)))
    differing = [result for result in results if result.exceeds(options.tolerance)]
    console = Console()
    if differing:
        print_table(console, _table(differing))
    print_lines(
        console,
        f"{len(differing)} of {len(results)} parameters differ",
        *_explain(results),
    )
    if options.report is not None:
        text = _report(options, results, len(differing))
        write_file(options.report, text, force=options.force)
        print_lines(console, f"report: {options.report}")
    return 1 if differing else 0


def find_arrays(name: str) -> Path:
    """Returns the path of a checkpoint, a bundled model or a hub model."""
    from prompt_tuning.pretrained.checkpoint_path import find_checkpoint

    return Path(name) if Path(name).exists() else find_checkpoint(name)


def _explain(results: "Sequence[ArrayDifference]") -> list[str]:
    """Returns a line if no name is in both checkpoints: they are unrelated."""
    if any(result.first and result.second for result in results):
        return []
    return ["no name is in both: parameters are compared by the names in the files"]


def _table(results: "Sequence[ArrayDifference]") -> "Table":
    from rich.table import Table

    headings = ("parameter", "first", "second", "unequal", "not finite")
    table = Table(*headings, "maximum", "mean difference")
    for result in results:
        cells = (result.name, result.first or "absent", result.second or "absent")
        numbers = (f"{result.unequal:,}", f"{result.not_finite:,}")
        distances = (f"{result.maximum:.3g}", f"{result.mean:.3g}")
        compared = result.unequal > 0
        table.add_row(*cells, *((*numbers, *distances) if compared else ("",) * 4))
    return table


def _report(
    options: argparse.Namespace, results: "Sequence[ArrayDifference]", differing: int
) -> str:
    import dataclasses
    import json

    report = {
        "first": options.first,
        "second": options.second,
        "tolerance": options.tolerance,
        "parameters": len(results),
        "differing": differing,
        "results": [dataclasses.asdict(result) for result in results],
    }
    return json.dumps(report, indent=2, allow_nan=False) + "\n"
