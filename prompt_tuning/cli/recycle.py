"""`prompt-tuning recycle`: maps a prompt of one model to another model."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from prompt_tuning.cli.option_types import numeric
from prompt_tuning.cli.shared_options import check_folder, refuse_bindings
from prompt_tuning.core.atomic_files import check_replaceable, write_file
from prompt_tuning.core.number_ranges import NonnegativeInteger, PositiveInteger
from prompt_tuning.core.progress_display import progress_bar
from prompt_tuning.core.status_line import clear_status, status, update_status

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from prompt_tuning.prompts.tools.recycling import SharedTokens

HELP = "map a prompt to another model through their shared tokens"
USES_JAX = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "prompt",
        metavar="PROMPT",
        help="a prompt file, run directory, checkpoint or PEFT folder",
    )
    parser.add_argument(
        "--from",
        dest="source",
        required=True,
        metavar="MODEL",
        help="the model the prompt was trained on: a Hugging Face folder, or "
        "bundled:NAME",
    )
    parser.add_argument(
        "--to",
        dest="target",
        required=True,
        metavar="MODEL",
        help="the model to map the prompt to: a Hugging Face folder, or bundled:NAME",
    )
    parser.add_argument(
        "--out",
        required=True,
        type=Path,
        metavar="FILE",
        help="the NumPy file to write",
    )
    parser.add_argument(
        "--method",
        choices=("v2v_linear", "v2v_mlp", "linear_combination"),
        default="v2v_linear",
        help="v2v_linear: a linear map of embeddings by least squares; "
        "v2v_mlp: a network; linear_combination: each vector as a combination of "
        "tokens",
    )
    parser.add_argument(
        "--skip_first",
        type=numeric(NonnegativeInteger),
        default=1000,
        metavar="N",
        help="shared tokens to skip at the start of the vocabulary",
    )
    parser.add_argument(
        "--words",
        type=numeric(PositiveInteger),
        default=4000,
        metavar="N",
        help="shared tokens to use after the skipped ones",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace FILE if it exists"
    )


def run(options: argparse.Namespace) -> int:
    """Maps a prompt to another model through tokens that both have."""
    from rich.console import Console

    from prompt_tuning.adapters.prompt_files import read_prompt
    from prompt_tuning.cli.console import print_lines
    from prompt_tuning.core.numpy_files import numpy_bytes
    from prompt_tuning.pretrained.source import read_vocabulary
    from prompt_tuning.prompts.tools.recycling import METHODS, check_width, share_tokens
    from prompt_tuning.settings.pretrained import Pretrained

    refuse_bindings(options)
    file: Path = options.out
    check_folder("--out", file)
    check_replaceable(file, force=options.force)
    console = Console()
    prompt = read_prompt(options.prompt)
    source = read_vocabulary(Pretrained(checkpoint=options.source))
    target = read_vocabulary(Pretrained(checkpoint=options.target))
    check_width(prompt, source)
    shared = share_tokens(
        source, target, skip_first=options.skip_first, words=options.words
    )
    print_lines(
        console,
        f"{len(shared.source)} shared tokens, width {source.width} to {target.width}, "
        f"{options.method}",
    )
    if options.method == "v2v_mlp":
        recycled = _train_network(console, prompt, shared)
    else:
        with status("solving"):
            recycled = METHODS[options.method](prompt, shared.source, shared.target)
    write_file(file, numpy_bytes(recycled), force=options.force)
    print_lines(
        console,
        f"{file}: {recycled.shape[0]} vectors of width {recycled.shape[1]}",
        f"next: a run with --gin_file=prompts/file.gin --gin.PROMPT_FILE='\"{file}\"'",
    )
    return 0


def _train_network(
    console: "Console", prompt: "np.ndarray", shared: "SharedTokens"
) -> "np.ndarray":
    """Trains the network with a progress bar, or with lines without a terminal."""
    from prompt_tuning.cli.console import print_lines
    from prompt_tuning.prompts.tools.recycling import EPOCHS, v2v_mlp

    clear_status()
    with progress_bar("training", EPOCHS) as advance, status():

        def report(epoch: int, error: float) -> None:
            advance(1)
            update_status(f"training, error {error:.4g}")
            if not console.is_terminal:
                print_lines(
                    console,
                    f"epoch {epoch}/{EPOCHS}  mean squared error {error:.4g}",
                )

        return v2v_mlp(prompt, shared.source, shared.target, on_epoch=report)
