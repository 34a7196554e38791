"""`prompt-tuning compose`: trains the memories of several documents together."""

import argparse
import shlex
from pathlib import Path

from prompt_tuning.cli import shared_options
from prompt_tuning.core.interrupts import INTERRUPTED
from prompt_tuning.core.number_ranges import NonnegativeInteger, PositiveInteger

HELP = "train the memories of several documents together, as one prefix"
HEADING = "Tune"
USES_JAX = True
RESUMES = True
NUMBERS: dict[str, shared_options.Number] = {
    "steps": (PositiveInteger, 100, "number of optimizer steps"),
    "batch_size": (PositiveInteger, 64, "rows per step, over all documents"),
    "seed": (NonnegativeInteger, 0, "seed of the order of the rows"),
}
"""Type, default and help of numeric options."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.description = (
        "Joins memories that `remember` trained separately into one prefix, and trains "
        "them until each still answers in the presence of the others. Writes a run "
        "directory for `generate --run`, a comparison with the documents "
        "(memory.json), and PEFT folders of the whole (peft) and of each memory "
        "(parts/0, ...). If the command is interrupted, the same command resumes it."
    )
    parser.add_argument(
        "memories",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="run directories of remember, at least two",
    )
    shared_options.add_output(parser, "the run directory")
    shared_options.add_numbers(parser, NUMBERS)


def run(options: argparse.Namespace) -> int:
    """Trains the memories, and prints how they compare with the documents."""
    shared_options.refuse_bindings(options)
    from prompt_tuning.api.memory_composition import compose

    joined = compose(
        options.memories,
        directory=options.out,
        **{name: getattr(options, name) for name in NUMBERS},
    )
    if joined.result is not None and not joined.result.finished:
        return INTERRUPTED if joined.result.interrupted else 0
    print(f"next: prompt-tuning generate --run {shlex.quote(str(options.out))} TEXT")
    return 0
