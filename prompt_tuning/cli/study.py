"""`prompt-tuning study`: lets a model write rows about documents, to learn from."""

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from prompt_tuning.cli.shared_options import (
    Number,
    add_model_and_output,
    add_numbers,
    refuse_bindings,
)
from prompt_tuning.core.number_ranges import (
    NonnegativeInteger,
    PositiveInteger,
    Share,
    Temperature,
)

HELP = "let a model write questions, answers and passages about documents"
HEADING = "Prepare data"
USES_JAX = True
RESUMES = True
DESCRIPTION = (
    "Cuts documents into chunks, and lets the frozen model write rows about each: "
    "conversations if it has a chat template (it asks and answers), or else passages, "
    "lines and continuations. All rows of a chunk share its keys and values. `train "
    "--loss own_context_distillation` learns from them, each with its chunk as the "
    "context of the teacher. If the command is interrupted, the same command resumes "
    "it and writes the same bits."
)
NUMBERS: dict[str, Number] = {
    "rows": (PositiveInteger, 1024, "number of rows to learn from"),
    "held_out": (NonnegativeInteger, 128, "number of rows to measure on"),
    "chunk": (
        PositiveInteger,
        None,
        "maximum number of tokens of a chunk (default: whole documents)",
    ),
    "passage": (PositiveInteger, 32, "maximum number of learned tokens of plain text"),
    "answer": (PositiveInteger, 256, "maximum number of tokens of an answer"),
    "rounds": (PositiveInteger, 1, "number of questions of a conversation"),
    "reasoning": (
        Share,
        None,
        "share of answers that begin with reasoning, if the chat template has "
        "enable_thinking (default: as the template does)",
    ),
    "question_temperature": (Temperature, 0.7, "temperature of questions"),
    "answer_temperature": (Temperature, 0.0, "temperature of answers and lines"),
    "temperature": (Temperature, 1.0, "temperature of continuations"),
    "seed": (NonnegativeInteger, 0, "seed of the rows"),
}
"""Type, default and help of numeric options."""
SAMPLES = 3
"""Number of rows to show."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.description = DESCRIPTION
    parser.add_argument(
        "documents",
        nargs="+",
        type=Path,
        metavar="DOCUMENT",
        help="text file, in UTF-8",
    )
    add_model_and_output(parser, "folder of the rows")
    parser.add_argument(
        "--kinds",
        nargs="+",
        metavar="KIND",
        help="kinds of rows: structure, summary, question, use and creative for a "
        "model with a chat template, or passage, line and continuation (default: all "
        "of either)",
    )
    add_numbers(parser, NUMBERS)


def run(options: argparse.Namespace) -> int:
    """Writes the rows, shows some, and tells how to learn from them."""
    refuse_bindings(options)
    from prompt_tuning.api.tune import load
    from prompt_tuning.core.progress_display import noted_bar
    from prompt_tuning.core.utf8_text import decode_text
    from prompt_tuning.texts.study_files import ROWS_FILE, write_study
    from prompt_tuning.texts.text_study import TextStudy, read_texts

    texts = {str(x): decode_text(x.read_bytes(), str(x)) for x in options.documents}
    study = TextStudy(
        kinds=options.kinds, **{name: getattr(options, name) for name in NUMBERS}
    )
    model = load(options.model)
    read = read_texts(texts, model.prompted, study)
    total = study.rows + study.held_out
    with noted_bar("writing rows", total) as advance:
        files = write_study(
            options.out, read, study, model.prompted, model.parameters, advance
        )
    chunks = "1 chunk" if len(read.chunks) == 1 else f"{len(read.chunks)} chunks"
    print(f"{total} rows about {chunks} are in {options.out}")
    with (options.out / ROWS_FILE).open() as lines:
        for _, line in zip(range(SAMPLES), lines, strict=False):
            print(_sample(json.loads(line)))
    command = ["prompt-tuning", "train", "--model", options.model]
    command += ["--train", str(files.train)]
    if files.held_out is not None:
        command += ["--eval", str(files.held_out)]
    command += ["--loss", "own_context_distillation", "--context_key", "chunk"]
    command += ["--contexts", str(files.chunks), "--method", "prefix", "--out", "RUN"]
    print(f"next: {shlex.join(command)}")
    return 0


def _sample(row: dict[str, Any]) -> str:
    if "messages" in row:
        *_, asked, answered = (str(message["content"]) for message in row["messages"])
    else:
        asked, answered = row["prompt"], row["completion"]
    return f"  {row['kind']}, chunk {row['chunk']}: {asked!r} -> {answered!r}"
