"""`prompt-tuning inspect`: prints each prompt vector's norm and nearest tokens."""

import argparse
import dataclasses
from typing import Any

from prompt_tuning.cli import shared_options
from prompt_tuning.cli.option_types import numeric
from prompt_tuning.cli.run_options import check_options
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.number_ranges import PositiveInteger

HELP = "print the nearest tokens and the norm of each prompt vector"
USES_JAX = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    shared_options.add_config_option(parser)
    shared_options.add_run_option(parser)
    shared_options.add_prompt_option(parser)
    parser.add_argument(
        "--nearest",
        type=numeric(PositiveInteger),
        default=5,
        metavar="N",
        help="tokens shown for each vector",
    )


def check(options: argparse.Namespace) -> None:
    """Checks for mistakes in the config and missing files."""
    check_options(options, trains=False)


def run(options: argparse.Namespace) -> int:
    """Prints a table for each of the run's prompts."""
    from rich.console import Console
    from rich.table import Table

    from prompt_tuning.cli.selected_run import read_run
    from prompt_tuning.core.parameters import merge
    from prompt_tuning.core.quantization.tables import wide_table
    from prompt_tuning.models.language_model import LanguageModel
    from prompt_tuning.prompts.tools.inspection import (
        input_vectors,
        nearest_tokens,
        shown_token,
    )
    from prompt_tuning.tuned.load_tuned import load_tuned

    # One process can examine a prompt without the mesh and its devices.
    run = dataclasses.replace(read_run(options), mesh=None)
    model, parameters = load_tuned(run, options.prompt)
    leaves: Any = model.weight_storage.abstract_streamed() | parameters
    tuned = merge(model.graph, leaves)
    assert isinstance(tuned, LanguageModel)
    prompts = input_vectors(tuned.prompts())
    if not prompts:
        raise InputError("the run has no prompt vectors to inspect")
    embeddings = wide_table(parameters, "token_embedder/embedding")
    for title, prompt in prompts.items():
        table = Table("vector", "norm", "nearest tokens (cosine)", title=title)
        rows = nearest_tokens(prompt, embeddings, options.nearest)
        for index, row in enumerate(rows):
            pairs = zip(row.tokens, row.similarities, strict=True)
            tokens = "  ".join(
                f"{shown_token(model.tokenizer, t)} {s:.2f}" for t, s in pairs
            )
            table.add_row(str(index), f"{row.norm:.3f}", tokens)
        Console().print(table)
    return 0
