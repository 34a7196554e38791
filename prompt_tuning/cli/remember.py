"""`prompt-tuning remember`: trains a prefix that stands for a document."""

import argparse
import shlex
from pathlib import Path

from prompt_tuning.cli.shared_options import (
    Number,
    add_model_and_output,
    add_numbers,
    refuse_bindings,
)
from prompt_tuning.core.interrupts import INTERRUPTED
from prompt_tuning.core.number_ranges import (
    AxisLength,
    NonnegativeInteger,
    PositiveInteger,
)

HELP = "train a key/value prefix that stands for a document"
HEADING = "Tune"
USES_JAX = True
SEVERAL_PROCESSES = False
RESUMES = True
DESCRIPTION = (
    "Trains a key/value prefix behind which the frozen model answers about as it does "
    "after the whole document. Rows to learn from are passages of the document and "
    "what the model itself writes behind it. Writes a run directory for `generate "
    "--run`, a comparison with the document itself (memory.json), and a PEFT folder "
    "of type CARTRIDGE (peft). If the command is interrupted, the same command goes on."
)


NUMBERS: dict[str, Number] = {
    "slots": (AxisLength, 128, "number of slots of the prefix"),
    "steps": (PositiveInteger, 200, "number of optimizer steps"),
    "batch_size": (PositiveInteger, 32, "number of rows of a step"),
    "rows": (PositiveInteger, 1024, "number of rows to learn from"),
    "held_out": (PositiveInteger, 128, "number of rows to measure on"),
    "passage": (PositiveInteger, 32, "maximum number of learned tokens of a row"),
    "chunk": (
        PositiveInteger,
        None,
        "maximum number of tokens that the model reads before it writes a row "
        "(default: the whole document)",
    ),
    "seed": (NonnegativeInteger, 0, "seed of the rows and of their order"),
}
"""Type, default and help of each option that is a number."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.description = DESCRIPTION
    parser.add_argument(
        "document", type=Path, metavar="DOCUMENT", help="text file, in UTF-8"
    )
    add_model_and_output(parser, "the run directory")
    parser.add_argument(
        "--start",
        choices=("matching", "chunks", "first"),
        default="matching",
        help="where the slots start: by attention matching, at windows spread over the "
        "document, or at its first tokens",
    )
    add_numbers(parser, NUMBERS)


def run(options: argparse.Namespace) -> int:
    """Trains the memory and prints what it is worth."""
    refuse_bindings(options)
    from prompt_tuning.api.memories import remember
    from prompt_tuning.core.utf8_text import decode_text

    document = options.document
    memory = remember(
        options.model,
        decode_text(document.read_bytes(), str(document)),
        directory=options.out,
        start=options.start,
        **{name: getattr(options, name) for name in NUMBERS},
    )
    if memory.result is not None and not memory.result.finished:
        return INTERRUPTED if memory.result.interrupted else 0
    folder = shlex.quote(str(options.out))
    print(f"next: prompt-tuning generate --run {folder} TEXT")
    return 0
