"""`prompt-tuning generate`: continues texts with a tuned prompt."""

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from prompt_tuning.cli import generation_options, run_options, shared_options
from prompt_tuning.cli.adapter_options import named_adapters
from prompt_tuning.cli.option_types import numeric
from prompt_tuning.cli.sampling_options import add_sampling_options
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.number_ranges import (
    NonnegativeInteger,
    PositiveInteger,
    RowCount,
)
from prompt_tuning.core.progress_display import progress_bar
from prompt_tuning.core.status_line import clear_status, status

if TYPE_CHECKING:
    from prompt_tuning.config.run import Run
    from prompt_tuning.decoding.request import Completion
    from prompt_tuning.texts.text_settings import TextSettings
    from prompt_tuning.texts.texts import Texts

HELP = "continue texts with a tuned prompt"
USES_JAX = True
SEVERAL_PROCESSES = True
USAGE = """
  prompt-tuning generate --run DIRECTORY [OPTION ...] [TEXT ...]
  prompt-tuning generate --model PATH [--prompt PATH] [OPTION ...] [TEXT ...]
  prompt-tuning generate --gin_file FILE [--gin.NAME=VALUE ...] [TEXT ...]
  prompt-tuning generate --run DIRECTORY --input FILE --output FILE [OPTION ...]"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.usage = USAGE
    shared_options.add_config_option(parser)
    shared_options.add_print_config_option(parser)
    shared_options.add_run_option(parser)
    shared_options.add_prompt_option(parser)
    parser.add_argument(
        "texts",
        nargs="*",
        metavar="TEXT",
        help="texts to continue; if none is given, the lines of standard input, or "
        "texts typed at a terminal, which are answered one by one",
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
    run_options.add_table_options(parser, ["chat_template_kwargs"])
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object per text and line: input, output, finish_reason "
        "(stop or length), input_tokens and output_tokens",
    )
    generation_options.add_line_options(parser)
    parser.add_argument(
        "--new_tokens",
        type=numeric(PositiveInteger),
        metavar="N",
        help="maximum number of new tokens (default: 64; for an answer 256, or half "
        "of the model's positions)",
    )
    parser.add_argument(
        "--batch_size",
        type=numeric(RowCount),
        default=32,
        metavar="N",
        help="texts that run together",
    )
    parser.add_argument(
        "--prompt_id",
        type=numeric(NonnegativeInteger),
        metavar="N",
        help="number of the prompt, from 0, of a run with several prompts",
    )
    generation_options.add_engine_options(parser)
    add_sampling_options(parser)
    run_options.add_run_options(parser, run_options.GENERATES)


def check(options: argparse.Namespace) -> None:
    """Checks for missing and contradictory options."""
    run_options.check_options(options, trains=False)
    generation_options.check_generation(options)


def run(options: argparse.Namespace) -> int:
    """Prints each text with its continuation, or each answer of a conversation."""
    from prompt_tuning.cli.selected_run import check_processes, print_config, read_run
    from prompt_tuning.processes.group import run_on_first

    if options.print_config:
        read_run(options)
        print_config()
        return 0
    texts = None
    if options.input is None:
        texts = run_on_first(lambda: _read_texts(options))
    run = read_run(options)
    check_processes(options, run)
    _continue(run, options, texts)
    return 0


def _read_texts(options: argparse.Namespace) -> list[str] | None:
    """Returns the texts to continue; None to read them from the terminal one by one."""
    if options.texts:
        return options.texts
    if sys.stdin.isatty():
        if _at_terminal() and not options.json:
            return None
        clear_status()
        print("reading texts, one on each line; Ctrl-D ends", file=sys.stderr)
    texts = [line.rstrip("\n") for line in sys.stdin]
    if not texts:
        raise InputError("no text was given, as an argument or on standard input")
    return texts


def _at_terminal() -> bool:
    """Whether the output of the only process is a terminal."""
    from prompt_tuning.processes.group import count

    return sys.stdout.isatty() and count() == 1


def _continue(run: "Run", options: argparse.Namespace, given: list[str] | None) -> None:
    """Continues texts, the lines of a file, or typed texts."""
    from prompt_tuning.cli.terminal_session import run_session, show
    from prompt_tuning.decoding.request import separate_equal
    from prompt_tuning.processes.group import is_first
    from prompt_tuning.texts.session import Session
    from prompt_tuning.texts.texts import Texts
    from prompt_tuning.tuned.load_tuned import load_tuned

    slots = options.batch_size
    if given is not None:
        slots = min(slots, len(given) * (options.n or 1))
    settings = generation_options.text_settings(options, slots)
    if options.input is None and given is None and settings.results > 1:
        raise InputError(
            "a text that is typed has one answer, shown while it is generated: leave "
            "out --n and --beams, or give the text as an argument"
        )
    texts = Texts(run, *load_tuned(run, options.prompt), day=_day(options))
    for name, path in named_adapters(options.adapter).items():
        texts.load(name, path)
    if options.input is not None:
        _continue_lines(texts, settings, options)
        return
    session = Session(texts, settings)
    if given is None:
        run_session(session)
    elif len(given) == 1 and settings.results == 1 and _shows_pieces(options):
        show(session, given[0])
    else:
        requests = separate_equal([texts.request(text, settings) for text in given])
        with status("generating"):
            results = list(texts.complete(requests, settings))
        if is_first():
            _print(texts, settings, options, given, results)


def _shows_pieces(options: argparse.Namespace) -> bool:
    """Whether a text is shown at a terminal while it is generated."""
    return _at_terminal() and not (options.json or options.logprobs)


def _day(options: argparse.Namespace) -> str | None:
    """Returns the day when the output's first lines were written, or today."""
    from prompt_tuning.core.resumable_lines import earlier_settings

    if options.output is None:
        return None
    earlier = {} if options.force else earlier_settings(options.output)
    if not earlier:
        return datetime.date.today().isoformat()
    day = earlier.get("day")
    return day if isinstance(day, str) else None


def _continue_lines(
    texts: "Texts", settings: "TextSettings", options: argparse.Namespace
) -> None:
    """Writes a result for each input line."""
    from prompt_tuning.core.resumable_lines import partial_file
    from prompt_tuning.processes.group import count
    from prompt_tuning.texts.line_file import LineFile

    if count() > 1:
        raise InputError("the lines of --input are continued by one process")
    with status("reading the input"):
        lines = LineFile(texts, settings, options.input)
    if options.output is None:
        clear_status()
        with progress_bar("generating", lines.count, shown=not _at_terminal()) as move:
            for result in lines.results():
                print(result, flush=True)
                move(1)
        return
    try:
        with progress_bar("generating", lines.count) as move:
            done = lines.write(options.output, move, force=options.force)
    except KeyboardInterrupt:
        partial = partial_file(options.output)
        print(f"interrupted: the same command continues {partial}", file=sys.stderr)
        raise
    earlier = f", {done:,} of them from an earlier start" if done else ""
    print(f"{lines.count:,} lines{earlier}: {options.output}")


def _print(
    texts: "Texts",
    settings: "TextSettings",
    options: argparse.Namespace,
    given: Sequence[str],
    results: "Sequence[Sequence[Completion]]",
) -> None:
    """Prints the results of more than one text, or more than one result.

    On a terminal, each is preceded by a line with its number. In a pipe, texts follow
    each other unchanged; only JSON escapes their line feeds.
    """
    from prompt_tuning.texts.line_file import completion_fields
    from prompt_tuning.texts.session import opening

    if options.json:
        single = settings.results == 1
        for text, completions in zip(given, results, strict=True):
            fields = completion_fields(completions, texts.tokenizer, single=single)
            print(json.dumps({"input": text, **fields}, ensure_ascii=False))
        return
    for number, (text, completions) in enumerate(zip(given, results, strict=True)):
        for sample, completion in enumerate(completions):
            if len(given) * len(completions) > 1 and sys.stdout.isatty():
                of = f"--- {number + 1} of {len(given)}"
                also = f", result {sample + 1} of {len(completions)}"
                print(f"{of}{also if len(completions) > 1 else ''}")
            print(f"{opening(text, texts.model, chat=options.chat)}{completion}")
