"""`prompt-tuning generate`: continues texts with a tuned prompt."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from prompt_tuning.cli.option_types import integer, number
from prompt_tuning.cli.run_options import GENERATES, add_run_options, check_options
from prompt_tuning.cli.shared_options import (
    add_config_option,
    add_print_config_option,
    add_prompt_option,
    add_run_option,
)
from prompt_tuning.core.activity import clear
from prompt_tuning.core.errors import InputError

if TYPE_CHECKING:
    from prompt_tuning.config.run import Run
    from prompt_tuning.generation.generator import Continuation
    from prompt_tuning.generation.text_session import TextSession

HELP = "continue texts with a tuned prompt"
USES_JAX = True
SEVERAL_PROCESSES = True
USAGE = """
  prompt-tuning generate --run DIRECTORY [OPTION ...] [TEXT ...]
  prompt-tuning generate --model PATH [--prompt PATH] [OPTION ...] [TEXT ...]
  prompt-tuning generate --gin_file FILE [--gin.NAME=VALUE ...] [TEXT ...]"""

NEW_TOKENS = 64
CHAT_TOKENS = 256


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
        help="texts to continue; if none is given, the lines of standard input, or "
        "texts typed at a terminal, each answered at once",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="send each text as a user's message, rendered with the chat template of "
        "the run, or of the tokenizer's folder; on a terminal without texts, the "
        "conversation continues until Ctrl-D",
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="system message before the first (with --chat)"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print an object for each text, on a line: input, output, finish_reason "
        "(stop or length), input_tokens and output_tokens",
    )
    _add_settings(parser)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds the settings of generation."""
    parser.add_argument(
        "--new_tokens",
        type=integer,
        metavar="N",
        help=f"maximum number of new tokens (default: {NEW_TOKENS}; with --chat "
        f"{CHAT_TOKENS} or half of the model's positions)",
    )
    parser.add_argument(
        "--temperature",
        type=number,
        default=0.0,
        metavar="T",
        help="temperature of sampling; 0 takes the most probable token",
    )
    parser.add_argument(
        "--top_k",
        type=integer,
        metavar="K",
        help="draw from the K most probable tokens only (needs --temperature)",
    )
    parser.add_argument(
        "--top_p",
        type=number,
        metavar="P",
        help="draw only from the most probable tokens that together have probability "
        "P (needs --temperature)",
    )
    parser.add_argument(
        "--seed", type=integer, default=0, metavar="N", help="seed of sampling"
    )
    parser.add_argument(
        "--batch_size",
        type=integer,
        default=32,
        metavar="N",
        help="texts continued at once",
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
    check_options(options, trains=False, unread=["data", "evaluation"])


def run(options: argparse.Namespace) -> int:
    """Prints each text with its continuation, or each answer of a conversation."""
    from prompt_tuning.cli.selected_run import check_processes, print_config, read_run
    from prompt_tuning.cli.terminal_session import run_session, show
    from prompt_tuning.processes.group import is_first, run_on_first

    if options.print_config:
        read_run(options)
        print_config()
        return 0
    if options.system is not None and not options.chat:
        raise InputError("--system is the first message of a conversation: add --chat")
    texts = run_on_first(lambda: _read_texts(options))
    run = read_run(options)
    check_processes(options, run)
    session = _open_session(run, options)
    if texts is None:
        run_session(session)
    elif len(texts) == 1 and not options.json and _at_terminal():
        show(session, texts[0])
    else:
        continuations = session.continue_texts(texts)
        if is_first():
            for number, continuation in enumerate(continuations):
                _print(session, options, texts, number, continuation)
    return 0


def _read_texts(options: argparse.Namespace) -> list[str] | None:
    """Returns the texts to continue; None if they are typed and answered in turn.

    Raises:
      InputError: if there are none.
    """
    if options.texts:
        return options.texts
    if sys.stdin.isatty():
        if _at_terminal() and not options.json:
            return None
        clear()
        print("reading texts, one on each line; Ctrl-D ends", file=sys.stderr)
    texts = [line.rstrip("\n") for line in sys.stdin]
    if not texts:
        raise InputError("no text was given, as an argument or on standard input")
    return texts


def _at_terminal() -> bool:
    """Returns whether the output of the only process is a terminal."""
    from prompt_tuning.processes.group import count

    return sys.stdout.isatty() and count() == 1


def _open_session(run: "Run", options: argparse.Namespace) -> "TextSession":
    """Loads the model and its settings of generation.

    Raises:
      InputError: if they cannot be used.
    """
    from prompt_tuning.decoding.sampling_settings import Sampling
    from prompt_tuning.generation.conversation import open_chat_encoder
    from prompt_tuning.generation.generator import Generator
    from prompt_tuning.generation.text_session import ChatSession, TextSession
    from prompt_tuning.tuned.load_tuned import load_tuned

    sampling = Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )
    if options.chat and run.source.template is not None:
        raise InputError(
            "--chat and DataSource.template both determine the text around a message: "
            "leave out --chat, and the run's template is used"
        )
    model, parameters = load_tuned(run, options.prompt)
    new_tokens = options.new_tokens
    if new_tokens is None:
        room = model.maximum_length or 2 * CHAT_TOKENS
        new_tokens = min(CHAT_TOKENS, room // 2) if options.chat else NEW_TOKENS
    sampling = dataclasses.replace(sampling, new_tokens=new_tokens)
    if not options.chat:
        generator = Generator(model, parameters, sampling, options.batch_size)
        template = run.source.token_template(model.interface)
        return TextSession(generator, template, options.prompt_id)
    choice = run.source.format_choice
    encoder = open_chat_encoder(model.needed_tokenizer(), choice)
    sampling = dataclasses.replace(sampling, ends=tuple(encoder.turn_ends()))
    generator = Generator(model, parameters, sampling, options.batch_size)
    return ChatSession(generator, encoder, options.system, options.prompt_id)


def _print(
    session: "TextSession",
    options: argparse.Namespace,
    texts: Sequence[str],
    number: int,
    continuation: "Continuation",
) -> None:
    """Prints one of several continuations.

    A line with its number separates it from others on a terminal. In a pipe, texts
    follow each other as they are; only JSON escapes their line feeds.
    """
    text = texts[number]
    if options.json:
        fields = continuation._asdict()
        output = {"input": text, "output": fields.pop("text"), **fields}
        print(json.dumps(output, ensure_ascii=False))
        return
    if len(texts) > 1 and sys.stdout.isatty():
        print(f"--- {number + 1} of {len(texts)}")
    print(f"{session.opening(text)}{continuation.text}")
