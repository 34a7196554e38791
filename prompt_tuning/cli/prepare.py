"""The command `prompt-tuning prepare`: converts text files to HDF5 files.

Help must be instant, so the modules behind the options import nothing heavy.
"""

import argparse
import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import Any, TypeVar

from prompt_tuning.cli.option_types import numeric
from prompt_tuning.cli.run_options import add_table_options
from prompt_tuning.cli.shared_options import add_tokenizer_option, refuse_bindings
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.interrupts import INTERRUPTED
from prompt_tuning.core.number_ranges import NonnegativeInteger
from prompt_tuning.core.typed_json import MAXIMUM_BYTES, parse_json, read_limited
from prompt_tuning.data.preparation.preparation_settings import (
    PACKINGS,
    FileCount,
    Preparation,
    RecordFormat,
    SequenceLength,
    Splits,
    TextFormat,
    TokenizerChoice,
    WorkerCount,
    parse_share,
)

Settings = TypeVar("Settings", Preparation, RecordFormat, TextFormat, Splits)


HELP = "convert JSON, text or tables to HDF5 files of token ids"
USES_JAX = False
DESCRIPTION = (
    "Writes HDF5 files of token ids and types (0 prompt, 1 completion, 2 padding, 3 "
    "separator), which train --train and --eval read, from JSON objects with a prompt "
    "and a completion, tables with named columns, or lines of plain text. A record is "
    "one such object, row or line; an example is a record, or one prompt and "
    "completion of it, as tokens. If the command is interrupted, the same command "
    "resumes it and writes the same bytes."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.description = DESCRIPTION
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="a .jsonl, .json (a list of objects), .parquet, .csv, .tsv or .txt file, "
        "or a folder of them",
    )
    parser.add_argument(
        "--output", required=True, metavar="FOLDER", help="a new folder"
    )
    add_tokenizer_option(parser, required=True)
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace the output of an earlier prepare command",
    )
    parser.add_argument(
        "--workers",
        type=numeric(WorkerCount),
        metavar="N",
        help="number of processes (default: one per core)",
    )
    _add_packing_options(parser.add_argument_group("sequences"))
    _add_record_options(parser.add_argument_group("records"))
    _add_text_options(parser.add_argument_group("texts and special tokens"))
    _add_split_options(parser.add_argument_group("splits"))


def _add_packing_options(group) -> None:
    group.add_argument(
        "--length",
        type=numeric(SequenceLength),
        default=Preparation.length,
        help="tokens per sequence",
    )
    group.add_argument(
        "--packing",
        choices=PACKINGS,
        default=Preparation.packing,
        metavar="PACKING",
        help="full: split examples where a sequence ends. greedy: pack as many whole "
        "examples as fit. single: one example per sequence. The last two need a suffix "
        "for examples longer than a sequence: ::drop, ::truncate_left or "
        "::truncate_right, as in greedy::drop, which also ends the sequence before an "
        "example that it leaves out; greedy::fill does not",
    )
    for name, effect in (
        ("packing", "what is packed as one example"),
        ("attention", "what ends with a separator token (type 3)"),
    ):
        group.add_argument(
            f"--{name}_boundary",
            choices=("line", "pair"),
            default="line",
            help=f"{effect}: a line with all its turns, or each pair",
        )
    group.add_argument(
        "--keep_prompt_only",
        action="store_true",
        help="keep pairs with an empty completion and sequences without learned tokens",
    )


def _add_record_options(group) -> None:
    for name in ("prompt", "completion"):
        group.add_argument(
            f"--{name}_key",
            default=name,
            metavar="KEY",
            help=f"key or column of the {name}; in JSON its value is a string, or a "
            "list of strings for several turns",
        )
    for name in ("prompt", "completion"):
        group.add_argument(
            f"--{name}_template",
            metavar="TEXT",
            help=f"text of the {name} with {{key}} for the value of a key or column",
        )
    group.add_argument(
        "--messages_key",
        default="messages",
        metavar="KEY",
        help="key of chat messages, each with a role and a content; needs --chat",
    )
    group.add_argument(
        "--weight_key",
        metavar="KEY",
        help="key of the loss weight of a line's tokens, a number; written as "
        "loss_weights",
    )
    group.add_argument(
        "--categories",
        metavar="FILE",
        help="category names, one per line or a JSON list; the category of each line "
        "is written as category_ids",
    )
    group.add_argument(
        "--category_key",
        default=RecordFormat.category_key,
        metavar="KEY",
        help="key of the category",
    )
    _add_reading_options(group)


def _add_reading_options(group) -> None:
    group.add_argument(
        "--no_quotes",
        dest="quotes",
        action="store_false",
        help='treat " in tables as an ordinary character, not as a quote',
    )
    group.add_argument(
        "--on_malformed",
        choices=("error", "skip"),
        default="error",
        help="if a record or a file cannot be used: error stops the "
        "command, which then writes nothing; skip counts it and lists it in "
        "skipped.jsonl",
    )


def _add_text_options(group) -> None:
    group.add_argument(
        "--prompt_prefix",
        default="",
        metavar="TEXT",
        help="text inserted before each prompt",
    )
    group.add_argument(
        "--prompt_postfix",
        default="",
        metavar="TEXT",
        help="text inserted after each prompt",
    )
    group.add_argument(
        "--no_space_separator",
        dest="space_separator",
        action="store_false",
        help="keep the spaces of the data (default: exactly one space separates a "
        "prompt from its completion, and starts a completion without a prompt)",
    )
    _add_chat_options(group)
    group.add_argument(
        "--special_tokens",
        metavar="JSON",
        help='a JSON object, or a file with one: {"eos_token": "...", "pad_token": '
        '"...", "bos_token": "...", "additional_special_tokens": ["..."]}',
    )


def _add_chat_options(group) -> None:
    group.add_argument(
        "--chat",
        action="store_true",
        help="render prompts and completions, or messages, with the tokenizer's chat "
        "template",
    )
    group.add_argument(
        "--chat_template", metavar="FILE", help="use another template, in jinja2"
    )
    group.add_argument(
        "--chat_date",
        metavar="DAY",
        help="date for a template that uses the current date (strftime_now), such as "
        "2026-07-26 (default: today, recorded in metadata.yaml)",
    )
    add_table_options(group, ("chat_template_kwargs", "turns"))


def _add_split_options(group) -> None:
    for name in ("dev", "test"):
        group.add_argument(
            f"--{name}",
            default="0",
            metavar="SHARE",
            help=f"records held out for {name}: a ratio such as 0.1 or a count such as "
            "500",
        )
    for name in ("train", "dev", "test"):
        group.add_argument(
            f"--{name}_files",
            type=numeric(FileCount),
            default=1,
            metavar="N",
            help=f"number of files that the {name} sequences are distributed over",
        )
    group.add_argument(
        "--shuffle", action="store_true", help="shuffle the records before packing"
    )
    group.add_argument(
        "--seed",
        type=numeric(NonnegativeInteger),
        default=Splits.seed,
        help="seed of the shuffle and the splits",
    )


def run(options: argparse.Namespace) -> int:
    """Writes the files and prints their metrics."""
    from rich.console import Console

    from prompt_tuning.cli.prepare_metrics import metrics_table
    from prompt_tuning.data.preparation.preparation import prepare
    from prompt_tuning.data.preparation.worker_pool import WorkerLostError

    refuse_bindings(options)
    console = Console()
    try:
        output = prepare(
            preparation_from_options(options),
            workers=options.workers,
            force=options.force,
            progress=True,
        )
    except WorkerLostError as problem:
        print(f"prompt-tuning prepare: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command resumes from here", file=sys.stderr)
        return INTERRUPTED
    console.print(metrics_table(output))
    console.print(f"done; the files are in {output}", markup=False, soft_wrap=True)
    return 0


def preparation_from_options(options: argparse.Namespace) -> Preparation:
    """Builds the settings of a preparation."""
    from prompt_tuning.data.preparation.records import read_category_names

    categories = options.categories
    record = _from_options(
        RecordFormat,
        options,
        categories=() if categories is None else read_category_names(categories),
    )
    text = _from_options(
        TextFormat, options, chat=options.chat or options.chat_template is not None
    )
    splits = _from_options(
        Splits,
        options,
        dev=parse_share(options.dev, "--dev"),
        test=parse_share(options.test, "--test"),
    )
    tokens = parse_special_tokens(options.special_tokens)
    return _from_options(
        Preparation,
        options,
        inputs=tuple(options.inputs),
        tokenizer=TokenizerChoice(options.tokenizer, tokens),
        record=record,
        text=text,
        splits=splits,
        skip_malformed=options.on_malformed == "skip",
    )


def _from_options(
    cls: type[Settings], options: argparse.Namespace, **converted: Any
) -> Settings:
    """Builds a settings dataclass from options with the names of its fields.

    `converted` has fields with other values than their option's.
    """
    values = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(cls)
        if field.name not in converted
    }
    return cls(**values, **converted)


def parse_special_tokens(text: str | None) -> tuple[tuple[str, str], ...]:
    """Parses roles and tokens from a JSON object, or a file with one.

    Raises:
      InputError: if it is not an object of strings and lists of strings.
    """
    if text is None:
        return ()
    name = f"--special_tokens {shown(text)}"
    # A long text is not a valid file name, nor is one with a zero byte.
    is_file = False
    with contextlib.suppress(OSError, ValueError):
        is_file = Path(text).is_file()
    try:
        source = read_limited(Path(text), MAXIMUM_BYTES) if is_file else text
        roles: Any = parse_json(source, name)
    except InputError as error:
        raise InputError(
            f"{name} is neither a file nor JSON: {error}; expected an object such as "
            '{"pad_token": "<pad>"}'
        ) from error
    if not isinstance(roles, dict):
        raise InputError(f"{name} is not a JSON object")
    pairs = [
        (role, token)
        for role, value in roles.items()
        for token in (value if isinstance(value, list) else [value])
    ]
    for role, token in pairs:
        if not isinstance(token, str) or not token:
            raise InputError(
                f"{name}: {shown(role)} is {shown(token)}, expected a "
                "nonempty string or a list of such strings"
            )
    return tuple(pairs)
