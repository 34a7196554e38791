"""`prompt-tuning generate`: continues texts with a tuned prompt."""

import argparse
import dataclasses
import datetime
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prompt_tuning.cli.adapter_options import named_adapters
from prompt_tuning.cli.generation_options import (
    add_engine_options,
    add_line_options,
    check_generation,
    engine_options,
    text_settings,
)
from prompt_tuning.cli.option_types import numeric
from prompt_tuning.cli.progress_bar import progress_bar
from prompt_tuning.cli.run_options import GENERATES, add_run_options, check_options
from prompt_tuning.cli.sampling_options import add_sampling_options, read_sampling
from prompt_tuning.cli.shared_options import (
    add_config_option,
    add_print_config_option,
    add_prompt_option,
    add_run_option,
)
from prompt_tuning.core.activity import activity, clear
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.number_ranges import (
    NonnegativeInteger,
    PositiveInteger,
    RowCount,
)

if TYPE_CHECKING:
    from prompt_tuning.config.run import Run
    from prompt_tuning.generation.generator import Generator
    from prompt_tuning.generation.text_session import TextSession
    from prompt_tuning.text_requests import TextRequests

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
    add_line_options(parser)
    parser.add_argument(
        "--new_tokens",
        type=numeric(PositiveInteger),
        metavar="N",
        help="maximum number of new tokens (default: 64; of an answer 256, or half of "
        "the model's positions)",
    )
    parser.add_argument(
        "--batch_size",
        type=numeric(RowCount),
        default=32,
        metavar="N",
        help="texts continued at once",
    )
    parser.add_argument(
        "--prompt_id",
        type=numeric(NonnegativeInteger),
        metavar="N",
        help="number of the prompt, from 0, of a run with several prompts",
    )
    add_engine_options(parser)
    add_sampling_options(parser)
    add_run_options(parser, GENERATES)


def check(options: argparse.Namespace) -> None:
    """Refuses options that are missing or contradict each other."""
    check_options(options, trains=False, unread=["data", "evaluation"])
    check_generation(options)


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
    if _has_engine(run):
        _continue_by_engine(run, options, texts)
    else:
        _continue_by_batches(run, options, texts)
    return 0


def _has_engine(run: "Run") -> bool:
    """Returns whether the decoding engine can continue texts with a run's model."""
    from prompt_tuning.pretrained.weight_storage import STREAMED
    from prompt_tuning.processes.group import count

    return run.mesh is None and count() == 1 and run.model.weights != STREAMED


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


def _continue_by_engine(
    run: "Run", options: argparse.Namespace, texts: list[str] | None
) -> None:
    """Continues texts, or the lines of a file, by the decoding engine."""
    from prompt_tuning.cli.terminal_session import run_session, show
    from prompt_tuning.decoding.request import separate_equal
    from prompt_tuning.text_adapters import TextAdapters
    from prompt_tuning.text_model import TextModel
    from prompt_tuning.text_requests import TextRequests
    from prompt_tuning.tuned.load_tuned import load_tuned

    slots = options.batch_size
    if texts is not None:
        slots = min(slots, len(texts) * (options.n or 1))
    settings = text_settings(options, slots, _day(options))
    several = settings.beams is not None or settings.sampling.n > 1
    if options.input is None and texts is None and several:
        raise InputError(
            "a text that is typed has one answer, shown while it is generated: leave "
            "out --n and --beams, or give the text as an argument"
        )
    model = TextModel(run, *load_tuned(run, options.prompt))
    requests = TextRequests(TextAdapters(model, named_adapters(options)), settings)
    if options.input is not None:
        _continue_lines(requests, options)
        return
    session = _engine_session(requests)
    if texts is None:
        run_session(session)
    elif len(texts) == 1 and not (options.json or several) and _at_terminal():
        show(session, texts[0])
    else:
        rows = [requests.encode(text) for text in texts]
        made = separate_equal([requests.request(ids) for ids in rows])
        with activity("generating"):
            results = list(requests.complete(made))
        _print(session, options, texts, [requests.fields(each) for each in results])


def _day(options: argparse.Namespace) -> str | None:
    """Returns the day on which the lines of the output were begun, or today's."""
    from prompt_tuning.core.resumable_lines import earlier_settings

    if options.output is None:
        return None
    earlier = {} if options.force else earlier_settings(options.output)
    if not earlier:
        return datetime.date.today().isoformat()
    day = earlier.get("day")
    return day if isinstance(day, str) else None


def _continue_lines(requests: "TextRequests", options: argparse.Namespace) -> None:
    """Writes a result for each line of the input."""
    from prompt_tuning.core.resumable_lines import partial_file
    from prompt_tuning.line_generation import LineGeneration

    with activity("reading the input"):
        lines = LineGeneration(requests, options.input)
    if options.output is None:
        clear()
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


def _engine_session(requests: "TextRequests") -> "TextSession":
    """Returns a session that an engine answers."""
    from prompt_tuning.generation.text_session import ChatSession, TextSession
    from prompt_tuning.text_requests import EngineGenerator

    generator = EngineGenerator(requests)
    if not requests.settings.chat:
        return TextSession(generator, requests.template())
    return ChatSession(generator, requests.encoder(), requests.settings.system)


def _continue_by_batches(
    run: "Run", options: argparse.Namespace, texts: list[str] | None
) -> None:
    """Continues texts in batches, on a mesh or with streamed weights."""
    from prompt_tuning.cli.terminal_session import run_session, show
    from prompt_tuning.processes.group import is_first

    flags = engine_options(options)
    if flags:
        raise InputError(
            f"{' and '.join(flags)} need the decoding engine, which runs on one device "
            "with all weights in its memory: leave them out, or give "
            "--gin.Run.mesh=None and --gin.Pretrained.weights=\"'device'\""
        )
    generator, session = _batch_session(run, options)
    if texts is None:
        run_session(session)
    elif len(texts) == 1 and not options.json and _at_terminal():
        show(session, texts[0])
    else:
        rows = [session.encode(text) for text in texts]
        chosen = options.prompt_id
        prompts = None if chosen is None else [chosen] * len(rows)
        continuations = generator.continue_rows(rows, prompts)
        fields = [each._asdict() for each in continuations]
        if is_first():
            named = [{"output": each.pop("text"), **each} for each in fields]
            _print(session, options, texts, named)


def _batch_session(
    run: "Run", options: argparse.Namespace
) -> "tuple[Generator, TextSession]":
    """Loads the model and its settings of generation.

    Raises:
      InputError: if they cannot be used.
    """
    from prompt_tuning.generation.generator import Generator
    from prompt_tuning.generation.text_session import ChatSession, TextSession
    from prompt_tuning.text_requests import NEW_TOKENS, default_new_tokens
    from prompt_tuning.tuned.adapter_texts import AdapterTexts
    from prompt_tuning.tuned.load_tuned import load_tuned

    sampling = read_sampling(options, options.new_tokens or NEW_TOKENS)
    model, parameters = load_tuned(run, options.prompt)
    reading = AdapterTexts(model, run.source)
    new_tokens = options.new_tokens
    if new_tokens is None:
        new_tokens = default_new_tokens(model, options.chat)
    sampling = dataclasses.replace(sampling, new_tokens=new_tokens)
    if not options.chat:
        generator = Generator(model, parameters, sampling, options.batch_size)
        return generator, TextSession(generator, reading.template, options.prompt_id)
    encoder = reading.open_chat()
    ends = (*sampling.ends, *encoder.turn_ends())
    sampling = dataclasses.replace(sampling, ends=ends)
    generator = Generator(model, parameters, sampling, options.batch_size)
    session = ChatSession(generator, encoder, options.system, options.prompt_id)
    return generator, session


def _print(
    session: "TextSession",
    options: argparse.Namespace,
    texts: Sequence[str],
    results: Sequence[dict[str, Any]],
) -> None:
    """Prints the results of several texts, or several of one.

    A line with its number separates one from others on a terminal. In a pipe, texts
    follow each other as they are; only JSON escapes their line feeds.
    """
    if options.json:
        for text, fields in zip(texts, results, strict=True):
            print(json.dumps({"input": text, **fields}, ensure_ascii=False))
        return
    for number, (text, fields) in enumerate(zip(texts, results, strict=True)):
        outputs = fields.get("outputs", [fields])
        for sample, each in enumerate(outputs):
            if len(texts) * len(outputs) > 1 and sys.stdout.isatty():
                of = f"--- {number + 1} of {len(texts)}"
                also = f", result {sample + 1} of {len(outputs)}"
                print(f"{of}{also if len(outputs) > 1 else ''}")
            print(f"{session.opening(text)}{each['output']}")
