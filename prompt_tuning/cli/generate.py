"""`prompt-tuning generate`: continues texts with a tuned prompt."""

import argparse
import sys

from prompt_tuning.cli.option_types import integer, number
from prompt_tuning.cli.run_options import GENERATES, add_run_options, check_options
from prompt_tuning.cli.shared_options import (
    add_config_option,
    add_print_config_option,
    add_prompt_option,
    add_run_option,
)
from prompt_tuning.core.errors import InputError

HELP = "continue texts with a tuned prompt"
USES_JAX = True
SEVERAL_PROCESSES = True
USAGE = """
  prompt-tuning generate --run DIRECTORY [OPTION ...] [TEXT ...]
  prompt-tuning generate --model PATH [--prompt PATH] [OPTION ...] [TEXT ...]
  prompt-tuning generate --gin_file FILE [--gin.NAME=VALUE ...] [TEXT ...]"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.usage = USAGE
    add_config_option(parser)
    add_print_config_option(parser)
    add_run_option(parser)
    add_prompt_option(parser)
    parser.add_argument(
        "texts",
        nargs="*",
        metavar="TEXT",
        help="texts to continue; lines of standard input if none is given",
    )
    parser.add_argument(
        "--new_tokens",
        type=integer,
        default=64,
        metavar="N",
        help="maximum number of new tokens (64)",
    )
    parser.add_argument(
        "--temperature",
        type=number,
        default=0.0,
        metavar="T",
        help="0 is greedy (the default)",
    )
    parser.add_argument(
        "--seed", type=integer, default=0, metavar="N", help="seed of sampling (0)"
    )
    parser.add_argument(
        "--batch_size",
        type=integer,
        default=32,
        metavar="N",
        help="texts continued at once (32)",
    )
    parser.add_argument(
        "--prompt_id",
        type=integer,
        metavar="N",
        help="number of the prompt, from 0, of a run with several prompts",
    )
    add_run_options(parser, GENERATES)


def check(options: argparse.Namespace) -> None:
    """Refuses options that are missing or contradict each other."""
    check_options(options, trains=False)


def run(options: argparse.Namespace) -> int:
    """Prints each text with its continuation."""
    from prompt_tuning.cli.selected_run import check_processes, print_config, read_run
    from prompt_tuning.generation.sampling import temperature_sampler
    from prompt_tuning.generation.text_generation import continue_texts
    from prompt_tuning.processes.group import is_first, run_on_first
    from prompt_tuning.tuned.load_tuned import load_tuned

    if options.print_config:
        read_run(options)
        print_config()
        return 0
    texts = run_on_first(lambda: _read_texts(options))
    run = read_run(options)
    check_processes(options, run)
    model, parameters = load_tuned(run, options.prompt)
    task = options.prompt_id
    continuations = continue_texts(
        model,
        parameters,
        texts,
        new_tokens=options.new_tokens,
        batch_size=options.batch_size,
        sampler=temperature_sampler(options.temperature),
        seed=options.seed,
        prompt_ids=None if task is None else [task] * len(texts),
        template=run.source.token_template(model.interface),
    )
    if not is_first():
        return 0
    separator = " -> " if model.config.architecture == "encoder_decoder" else ""
    for text, continuation in zip(texts, continuations, strict=True):
        print(f"{text}{separator}{continuation}")
    return 0


def _read_texts(options: argparse.Namespace) -> list[str]:
    """Returns the texts to continue.

    Raises:
      InputError: if there are none.
    """
    texts = options.texts or [line.rstrip("\n") for line in sys.stdin]
    if not texts:
        raise InputError("no text was given, as an argument or on standard input")
    return texts
