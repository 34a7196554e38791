"""`prompt-tuning chat`: a conversation with a model and its adapters."""

import argparse
from typing import TYPE_CHECKING

from prompt_tuning.cli.adapter_options import add_adapter_option, named_adapters
from prompt_tuning.cli.option_types import numeric
from prompt_tuning.cli.run_options import GENERATES, add_run_options, check_options
from prompt_tuning.cli.sampling_options import add_sampling_options, read_sampling
from prompt_tuning.cli.shared_options import (
    add_config_option,
    add_prompt_option,
    add_run_option,
)
from prompt_tuning.core.number_ranges import PositiveInteger

if TYPE_CHECKING:
    from prompt_tuning.chat_session import AdapterChat

HELP = "talk with a model, and choose among adapters"
USES_JAX = True
SEVERAL_PROCESSES = False
PRINTS_STAGES = True
USAGE = """
  prompt-tuning chat --run DIRECTORY [--adapter NAME=PATH ...] [OPTION ...]
  prompt-tuning chat --model PATH [--adapter NAME=PATH ...] [OPTION ...]"""
NEW_TOKENS = 256
LENGTH = 4096


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.usage = USAGE
    add_config_option(parser)
    add_run_option(parser)
    add_prompt_option(parser)
    add_adapter_option(parser, "/adapter NAME chooses")
    parser.add_argument(
        "--system", metavar="TEXT", help="system message before the first"
    )
    parser.add_argument(
        "--new_tokens",
        type=numeric(PositiveInteger),
        metavar="N",
        help=f"maximum number of new tokens of an answer (default: {NEW_TOKENS}, or "
        "half of the model's positions)",
    )
    parser.add_argument(
        "--length",
        type=numeric(PositiveInteger),
        default=LENGTH,
        metavar="N",
        help="maximum number of tokens of a conversation, up to the model's positions",
    )
    add_sampling_options(parser)
    add_run_options(parser, GENERATES)


def check(options: argparse.Namespace) -> None:
    """Refuses options that are missing or contradict each other."""
    check_options(options, trains=False, unread=["data", "evaluation"])
    named_adapters(options)


def run(options: argparse.Namespace) -> int:
    """Answers each line that is typed."""
    from prompt_tuning.cli.terminal_session import run_session

    run_session(_open_session(options))
    return 0


def _open_session(options: argparse.Namespace) -> "AdapterChat":
    """Loads the model and its adapters.

    Raises:
      InputError: if they cannot be used, or the model has no chat template.
    """
    from prompt_tuning.chat_session import AdapterChat
    from prompt_tuning.cli.selected_run import read_run
    from prompt_tuning.core.activity import activity, clear
    from prompt_tuning.text_model import TextModel
    from prompt_tuning.tuned.load_tuned import load_tuned

    run = read_run(options)
    model = TextModel(run, *load_tuned(run, options.prompt))
    model.prompted.needed_tokenizer()
    encoder = model.texts().open_chat()
    room = model.prompted.maximum_length or options.length
    length = min(options.length, room)
    new_tokens = options.new_tokens or min(NEW_TOKENS, length // 2)
    sampling = read_sampling(options, new_tokens)
    engine = model.engine(slots=1, length=length)
    encoders = {}
    for name, path in named_adapters(options).items():
        model.load_adapter(name, path)
        encoders[name] = model.texts(name).open_chat()
    with activity("compiling"):
        engine.compile([sampling])
    clear()
    return AdapterChat(engine, encoder, sampling, options.system, encoders)
