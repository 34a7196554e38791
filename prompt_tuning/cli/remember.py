"""`prompt-tuning remember`: trains a prefix that replaces a document."""

import argparse
import importlib.util
import json
import shlex
import warnings
from collections.abc import Sequence
from pathlib import Path

from prompt_tuning.cli import shared_options
from prompt_tuning.cli.option_types import duration, numeric
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.interrupts import INTERRUPTED
from prompt_tuning.core.number_ranges import (
    AxisLength,
    NonnegativeInteger,
    PositiveInteger,
    Share,
)

HELP = "train a key/value prefix that replaces a document"
HEADING = "Tune"
USES_JAX = True
RESUMES = True
DESCRIPTION = (
    "Trains a key/value prefix with which the frozen model answers about as it does "
    "after reading the whole document. It learns from passages of the document and "
    "from text that the model itself writes about it. Writes a run directory for "
    "`generate --run`, a comparison with the document itself (memory.json), and a PEFT "
    "folder of type CARTRIDGE (peft). If the command is interrupted, the same command "
    "resumes it."
)
PICTURE = "memories.png"


NUMBERS: dict[str, shared_options.Number] = {
    "steps": (PositiveInteger, None, "number of optimizer steps (default: 200)"),
    "batch_size": (PositiveInteger, 32, "number of rows of a step"),
    "rows": (PositiveInteger, None, "number of rows to learn from (default: 1024)"),
    "held_out": (PositiveInteger, 128, "number of rows to measure on"),
    "passage": (PositiveInteger, 32, "maximum number of learned tokens of a row"),
    "chunk": (
        PositiveInteger,
        None,
        "maximum number of tokens that the model reads before it writes a row "
        "(default: the whole document, or half of the model's positions)",
    ),
    "reasoning": (
        Share,
        None,
        "share of answers that begin with reasoning, if the chat template has "
        "enable_thinking (default: as the template does)",
    ),
    "seed": (NonnegativeInteger, 0, "seed of the rows and of their order"),
}
"""Type, default and help of numeric options."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.description = DESCRIPTION
    parser.add_argument(
        "document", type=Path, metavar="DOCUMENT", help="text file, in UTF-8"
    )
    shared_options.add_model_and_output(parser, "the run directory")
    parser.add_argument(
        "--start",
        choices=("matching", "chunks", "first"),
        help="initial slots: from attention matching (default), from windows spread "
        "over the document, or from its first tokens",
    )
    parser.add_argument(
        "--slots",
        nargs="+",
        type=numeric(AxisLength),
        metavar="N",
        help="number of slots of the prefix (default: 128); several numbers give a "
        "memory each, in DIR/slots_N and from the same rows, and a picture that "
        "compares them",
    )
    parser.add_argument(
        "--budget",
        type=duration,
        metavar="TIME",
        help="time for everything, such as 10m: a short probe chooses as many --rows "
        "and --steps as fit",
    )
    parser.add_argument(
        "--from",
        dest="start_from",
        type=Path,
        metavar="DIR",
        help="memory of an earlier version of the document: new rows are only about "
        "what changed, and old rows check that old answers still hold",
    )
    shared_options.add_numbers(parser, NUMBERS)


def run(options: argparse.Namespace) -> int:
    """Trains the memory, and prints how it compares with the document."""
    shared_options.refuse_bindings(options)
    from prompt_tuning.api.memories import SLOTS, check_length, remember
    from prompt_tuning.api.memory_update import STUDY
    from prompt_tuning.api.tune import load
    from prompt_tuning.core.utf8_text import decode_text

    document, sizes = options.document, list(dict.fromkeys(options.slots or [None]))
    text, several = decode_text(document.read_bytes(), str(document)), len(sizes) > 1
    if several and options.start_from is not None:
        raise InputError(
            "--from starts from one memory, whose number of slots stays, and --slots "
            f"has {len(sizes)} numbers: leave out --slots"
        )
    folders = [options.out / f"slots_{n}" if several else options.out for n in sizes]
    model = load(options.model)
    if options.start_from is None:
        check_length(text, model, max(size or SLOTS for size in sizes))
    for slots, folder in zip(sizes, folders, strict=True):
        memory = remember(
            model,
            text,
            slots=slots,
            directory=folder,
            study_directory=options.out / STUDY if several else None,
            start=options.start,
            start_from=options.start_from,
            budget=None if options.budget is None else options.budget / len(sizes),
            **{name: getattr(options, name) for name in NUMBERS},
        )
        if memory.result is not None and not memory.result.finished:
            return INTERRUPTED if memory.result.interrupted else 0
    if several:
        _draw(folders, options.out / PICTURE)
    folder = shlex.quote(str(folders[-1]))
    print(f"next: prompt-tuning generate --run {folder} TEXT")
    return 0


def _draw(folders: Sequence[Path], file: Path) -> None:
    """Draws the quality of memories against their compression."""
    from prompt_tuning.api.memories import RESULTS

    if importlib.util.find_spec("matplotlib") is None:
        warnings.warn(
            "no picture was drawn: `pip install matplotlib` enables it", stacklevel=2
        )
        return
    from prompt_tuning.texts.memory_plot import plot_memories

    plot_memories([json.loads((x / RESULTS).read_text()) for x in folders], file)
    print(f"quality over compression: {file}")
