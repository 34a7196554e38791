"""The command `prompt-tuning prepare`: from files of text to HDF5 files.

What says which options there are imports nothing heavy, so that help is instant.
"""

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.preparation.preparation_settings import (
    PACKINGS,
    Preparation,
    RecordFormat,
    Splits,
    TextFormat,
    TokenizerChoice,
    parse_share,
)

INTERRUPTED = 130
"""The exit code that shells give a command that was interrupted."""

DESCRIPTION = (
    "Makes HDF5 files of token ids and types (0 prompt, 1 completion, 2 padding, 3 "
    "separator), which TRAIN_FILES and EVALUATION_FILES read, from lines of JSON with "
    "a prompt and a completion, tables with a header, or lines of plain text. "
    "Interrupted at any moment, the same command goes on and ends with the same bytes."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.description = DESCRIPTION
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="a .jsonl, .txt, .csv or .tsv file, or a folder of them",
    )
    parser.add_argument(
        "--output", required=True, metavar="FOLDER", help="a new folder"
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="PATH",
        help="a file, or the folder of a checkpoint",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace what such a command wrote before"
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="processes; by default one to a core"
    )
    _add_packing_options(parser.add_argument_group("sequences"))
    _add_record_options(parser.add_argument_group("what a record says"))
    _add_text_options(parser.add_argument_group("texts and special tokens"))
    _add_split_options(parser.add_argument_group("splits"))


def _add_packing_options(group) -> None:
    group.add_argument(
        "--length", type=int, default=1024, help="tokens of a sequence (1024)"
    )
    group.add_argument(
        "--packing",
        choices=PACKINGS,
        default="full",
        metavar="PACKING",
        help="full: articles are cut where a sequence ends (the default). greedy: as "
        "many whole articles as fit. single: one article to a sequence. The last two "
        "say what becomes of an article that is longer than a sequence: ::drop, "
        "::truncate_left or ::truncate_right, as in greedy::drop",
    )
    for name, what in (
        ("packing", "what is packed as one article"),
        ("attention", "what ends with a separator (type 3)"),
    ):
        group.add_argument(
            f"--{name}_boundary",
            choices=("line", "pair"),
            default="line",
            help=f"{what}: a line with all its turns (the default), or each pair",
        )
    group.add_argument(
        "--keep_prompt_only",
        action="store_true",
        help="keep pairs whose completion is empty, and sequences in which nothing is "
        "learned",
    )


def _add_record_options(group) -> None:
    for name in ("prompt", "completion"):
        group.add_argument(
            f"--{name}_key",
            default=name,
            metavar="KEY",
            help=f"key or column of the {name}; in JSON it holds a string, or a list "
            "of them for several turns",
        )
    for name in ("prompt", "completion"):
        group.add_argument(
            f"--{name}_template",
            metavar="TEXT",
            help=f"the {name} as a text with {{key}} for what a key or column holds",
        )
    group.add_argument(
        "--messages_key",
        default="messages",
        metavar="KEY",
        help="key of chat messages, each a role and a content; needs --chat",
    )
    group.add_argument(
        "--weight_key",
        metavar="KEY",
        help="key of a number, by which the loss of a line's tokens is multiplied; "
        "written as loss_weights",
    )
    group.add_argument(
        "--categories",
        metavar="FILE",
        help="names, one to a line or a list in JSON; each token gets its line's "
        "category_ids",
    )
    group.add_argument(
        "--category_key", default="category", metavar="KEY", help="key of the category"
    )
    _add_reading_options(group)


def _add_reading_options(group) -> None:
    group.add_argument(
        "--no_quotes",
        action="store_true",
        help='in tables, take " as a character and not as a quote',
    )
    group.add_argument(
        "--on_malformed",
        choices=("error", "skip"),
        default="error",
        help="what a record or a file does that cannot be used: end the command, which "
        "then writes nothing, or be counted and listed in skipped.jsonl",
    )


def _add_text_options(group) -> None:
    group.add_argument(
        "--prompt_prefix", default="", metavar="TEXT", help="put before each prompt"
    )
    group.add_argument(
        "--prompt_postfix", default="", metavar="TEXT", help="put after each prompt"
    )
    group.add_argument(
        "--no_space_separator",
        action="store_true",
        help="take texts as they are; otherwise exactly one space parts a prompt from "
        "its completion, and begins a completion that has none",
    )
    group.add_argument(
        "--chat",
        action="store_true",
        help="render prompts and completions, or messages, with the tokenizer's chat "
        "template",
    )
    group.add_argument(
        "--chat_template", metavar="FILE", help="another template, in jinja2"
    )
    group.add_argument(
        "--chat_date",
        metavar="DAY",
        help="the day that a template is told which asks for it (strftime_now), such "
        "as 2026-07-26; by default today, which metadata.yaml keeps",
    )
    group.add_argument(
        "--special_tokens",
        metavar="JSON",
        help='an object or a file of one: {"eos_token": "...", "pad_token": "...", '
        '"bos_token": "...", "additional_special_tokens": ["..."]}',
    )


def _add_split_options(group) -> None:
    for name in ("dev", "test"):
        group.add_argument(
            f"--{name}",
            default="0",
            metavar="SHARE",
            help=f"records held out for {name}: a ratio as 0.1, or a count as 500",
        )
    for name in ("train", "dev", "test"):
        group.add_argument(
            f"--{name}_files",
            type=int,
            default=1,
            metavar="N",
            help=f"files that the {name} sequences are dealt to, evenly",
        )
    group.add_argument(
        "--shuffle", action="store_true", help="shuffle records before they are packed"
    )
    group.add_argument(
        "--seed", type=int, default=0, help="of the shuffle and the splits (0)"
    )


def prepare(options: argparse.Namespace) -> int:
    """Makes the files, and prints what is in them."""
    from rich.console import Console

    from prompt_tuning.cli.prepare_progress import metrics_table, shown_progress
    from prompt_tuning.data.preparation.preparation import prepare as run
    from prompt_tuning.data.preparation.worker_pool import WorkerLostError

    if options.bindings:
        raise InputError(f"prepare reads no config, so nothing uses {options.bindings}")
    console = Console()
    try:
        with shown_progress(console) as reporter:
            output = run(
                _preparation(options),
                workers=options.workers,
                force=options.force,
                reporter=reporter,
            )
    except WorkerLostError as problem:
        print(f"prompt-tuning prepare: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return INTERRUPTED
    console.print(metrics_table(output))
    console.print(f"done; the files are in {output}", markup=False, soft_wrap=True)
    return 0


def _preparation(options: argparse.Namespace) -> Preparation:
    return Preparation(
        inputs=tuple(options.inputs),
        output=options.output,
        tokenizer=TokenizerChoice(
            options.tokenizer, special_tokens(options.special_tokens)
        ),
        length=options.length,
        packing=options.packing,
        record=_record_format(options),
        text=_text_format(options),
        splits=_splits(options),
        skip_malformed=options.on_malformed == "skip",
    )


def _record_format(options: argparse.Namespace) -> RecordFormat:
    from prompt_tuning.data.preparation.records import category_names

    named = options.categories
    return RecordFormat(
        prompt_key=options.prompt_key,
        completion_key=options.completion_key,
        category_key=options.category_key,
        weight_key=options.weight_key,
        messages_key=options.messages_key,
        prompt_template=options.prompt_template,
        completion_template=options.completion_template,
        quotes=not options.no_quotes,
        categories=() if named is None else category_names(named),
    )


def _text_format(options: argparse.Namespace) -> TextFormat:
    return TextFormat(
        prompt_prefix=options.prompt_prefix,
        prompt_postfix=options.prompt_postfix,
        space_separator=not options.no_space_separator,
        keep_prompt_only=options.keep_prompt_only,
        packing_boundary=options.packing_boundary,
        attention_boundary=options.attention_boundary,
        chat=options.chat or options.chat_template is not None,
        chat_template=options.chat_template,
        chat_date=options.chat_date,
    )


def _splits(options: argparse.Namespace) -> Splits:
    return Splits(
        dev=parse_share(options.dev, "--dev"),
        test=parse_share(options.test, "--test"),
        train_files=options.train_files,
        dev_files=options.dev_files,
        test_files=options.test_files,
        shuffle=options.shuffle,
        seed=options.seed,
    )


def special_tokens(text: str | None) -> tuple[tuple[str, str], ...]:
    """Roles and tokens, from an object in JSON or a file that holds one.

    Raises:
      InputError: if it is no object of strings and lists of strings.
    """
    if text is None:
        return ()
    source = text
    with contextlib.suppress(OSError):
        if Path(text).is_file():
            source = Path(text).read_text(encoding="utf-8")
    try:
        found: Any = json.loads(source)
    except ValueError as error:
        raise InputError(
            f"--special_tokens {text!r} is no file and not JSON: {error}; expected "
            'such as {"pad_token": "<pad>"}'
        ) from error
    if not isinstance(found, dict):
        raise InputError(f"--special_tokens {text!r} is no object in JSON")
    pairs = [
        (role, token)
        for role, value in found.items()
        for token in (value if isinstance(value, list) else [value])
    ]
    for role, token in pairs:
        if not isinstance(token, str) or not token:
            raise InputError(
                f"--special_tokens: {role!r} is {token!r}, expected a text or a list "
                "of texts"
            )
    return tuple(pairs)
