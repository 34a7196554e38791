"""`prompt-tuning chat`: a conversation with a model and its adapters."""

import argparse
from typing import TYPE_CHECKING

from prompt_tuning.cli import run_options, shared_options
from prompt_tuning.cli.adapter_options import add_adapter_option, named_adapters
from prompt_tuning.cli.option_types import numeric
from prompt_tuning.cli.sampling_options import add_sampling_options, read_sampling
from prompt_tuning.core.number_ranges import PositiveInteger

if TYPE_CHECKING:
    from prompt_tuning.texts.session import Session

HELP = "talk with a model, and choose among adapters"
USES_JAX = True
PRINTS_STAGES = True
USAGE = """
  prompt-tuning chat --run DIRECTORY [--adapter NAME=PATH ...] [OPTION ...]
  prompt-tuning chat --model PATH [--adapter NAME=PATH ...] [OPTION ...]"""
LENGTH = 4096


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.usage = USAGE
    shared_options.add_config_option(parser)
    shared_options.add_run_option(parser)
    shared_options.add_prompt_option(parser)
    add_adapter_option(parser, "/adapter NAME chooses")
    parser.add_argument(
        "--system", metavar="TEXT", help="system message before the first"
    )
    run_options.add_table_options(parser, ["chat_template_kwargs"])
    parser.add_argument(
        "--new_tokens",
        type=numeric(PositiveInteger),
        metavar="N",
        help="maximum number of new tokens of an answer (default: 256, or half of the "
        "model's positions)",
    )
    parser.add_argument(
        "--length",
        type=numeric(PositiveInteger),
        default=LENGTH,
        metavar="N",
        help="maximum number of tokens of a conversation, up to the model's positions",
    )
    add_sampling_options(parser)
    run_options.add_run_options(parser, run_options.GENERATES)


def check(options: argparse.Namespace) -> None:
    """Checks for missing and contradictory options."""
    run_options.check_options(options, trains=False)
    named_adapters(options.adapter)


def run(options: argparse.Namespace) -> int:
    """Answers each typed line."""
    from prompt_tuning.cli.terminal_session import run_session

    run_session(_open_session(options))
    return 0


def _open_session(options: argparse.Namespace) -> "Session":
    from prompt_tuning.cli.selected_run import read_run
    from prompt_tuning.core.status_line import clear_status, status
    from prompt_tuning.texts.session import Session
    from prompt_tuning.texts.text_settings import TextSettings, default_new_tokens
    from prompt_tuning.texts.texts import Texts
    from prompt_tuning.tuned.load_tuned import load_tuned

    run = read_run(options)
    texts = Texts(run, *load_tuned(run, options.prompt))
    length = min(options.length, texts.model.maximum_length or options.length)
    new_tokens = options.new_tokens or default_new_tokens(length, chat=True)
    settings = TextSettings(
        sampling=read_sampling(options, new_tokens),
        new_tokens=new_tokens,
        chat=True,
        system=options.system,
        chat_template_kwargs=options.chat_template_kwargs,
    )
    session = Session(texts, settings)
    for name, path in named_adapters(options.adapter).items():
        # A missing chat template is reported before the first message.
        _ = texts.load(name, path).encoding.chat
    engine = texts.open_engine(slots=1, length=length)
    with status("compiling"):
        engine.compile([settings.sampling])
    clear_status()
    return session
