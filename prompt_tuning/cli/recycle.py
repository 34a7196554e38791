"""The command `prompt-tuning recycle`: a prompt of one model, made one of another."""

import argparse
import functools
from pathlib import Path

import numpy as np
from jaxtyping import Float
from rich.console import Console
from rich.progress import Progress

from prompt_tuning.adapters.prompt_files import read_prompt
from prompt_tuning.core.errors import InputError
from prompt_tuning.pretrained.source import Pretrained, read_vocabulary
from prompt_tuning.prompts.tools.recycling import (
    EPOCHS,
    METHODS,
    check_width,
    share_tokens,
    v2v_mlp,
)


def recycle(options: argparse.Namespace) -> int:
    """Maps a prompt to another model through the vocabulary that both share."""
    file = Path(options.out)
    if options.bindings:
        raise InputError(f"recycle reads no config, so nothing uses {options.bindings}")
    if not file.parent.is_dir():
        raise InputError(f"--out {file}: there is no folder {file.parent}")
    console = Console()
    say = functools.partial(
        console.print, markup=False, highlight=False, soft_wrap=True
    )
    prompt = read_prompt(options.prompt)
    source, target = (
        read_vocabulary(Pretrained(checkpoint=checkpoint))
        for checkpoint in (options.source, options.target)
    )
    check_width(prompt, source)
    shared = share_tokens(
        source, target, skip_first=options.skip_first, words=options.words
    )
    say(
        f"{len(shared.source)} shared tokens, width {source.width} to {target.width}, "
        f"{options.method}"
    )
    if options.method == "v2v_mlp":
        recycled = _taught(console, prompt, shared.source, shared.target)
    else:
        with console.status("solving"):
            recycled = METHODS[options.method](prompt, shared.source, shared.target)
    with file.open("wb") as opened:
        np.save(opened, recycled)
    say(f"{file}: {recycled.shape[0]} vectors of width {recycled.shape[1]}")
    say(f"next: a run with --gin_file=prompts/file.gin --gin.PROMPT_FILE='\"{file}\"'")
    return 0


def _taught(
    console: Console,
    prompt: Float[np.ndarray, "P D"],
    source: Float[np.ndarray, "n D"],
    target: Float[np.ndarray, "n E"],
) -> Float[np.ndarray, "P E"]:
    """Teaches the network under a bar, or under lines without a terminal."""
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("teaching", total=EPOCHS)

        def tell(epoch: int, error: float) -> None:
            progress.update(task, completed=epoch, description=f"error {error:.4g}")
            if not console.is_terminal:
                line = f"epoch {epoch}/{EPOCHS}  mean squared error {error:.4g}"
                console.print(line, markup=False, highlight=False)

        return v2v_mlp(prompt, source, target, on_epoch=tell)
