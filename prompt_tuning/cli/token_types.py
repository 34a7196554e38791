"""The command `prompt-tuning token-types`: sets the types of the tokens of HDF5 rows.

Help must be instant, so the modules behind the options import nothing heavy.
"""

import argparse
from typing import TYPE_CHECKING

from prompt_tuning.cli.shared_options import add_tokenizer_option, refuse_bindings
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.typed_json import MAXIMUM_INTEGER

if TYPE_CHECKING:
    from prompt_tuning.data.text.tokenizers import Tokenizer
    from prompt_tuning.data.tools.type_rules import TypeRule

HELP = "add or replace the token types of HDF5 files"
USES_JAX = False
ALIAS = ("prepare", "--add-token-types")
DESCRIPTION = (
    "Adds token_type_ids (0 prompt, 1 completion, 2 padding, 3 separator) to HDF5 "
    "files with input_ids, by a rule or from an array. A row may hold several "
    "segments, each closed by the --end token. A file is replaced "
    "only by a copy that was read back and compared with it. `prepare "
    "--add-token-types FILE ...` is the same command."
)
NAMES = ("prompt", "completion", "padding", "separator")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.description = DESCRIPTION
    parser.add_argument("files", nargs="+", metavar="FILE", help="an HDF5 file")
    add_rules(parser.add_argument_group("which tokens are prompt"))
    parser.add_argument("--replace", action="store_true", help="replace existing types")
    add_tokenizer_option(parser, "; needed for tokens given as text")


def add_rules(group) -> None:
    """Adds the options of the rule; one of the first five is required."""
    rule = group.add_mutually_exclusive_group(required=True)
    for which in ("last", "first"):
        rule.add_argument(
            f"--until_{which}",
            nargs="+",
            metavar="TOKEN",
            help=f"in each segment, all tokens up to the {which} of these are prompt",
        )
    rule.add_argument(
        "--lengths",
        metavar="N",
        help="the first N tokens of a row are prompt; or a .npy file with a number for "
        "each row, [rows]",
    )
    rule.add_argument(
        "--all_completion", action="store_true", help="every token is learned"
    )
    rule.add_argument(
        "--array", metavar="FILE", help="a .npy file of the types, [rows, length]"
    )
    group.add_argument(
        "--end",
        metavar="TOKEN",
        help="the token that closes a segment (type 3), such as EOS; each segment of a "
        "row has a separate prompt. As the first token of a row, padding aside, it "
        "closes nothing",
    )
    group.add_argument(
        "--padding",
        metavar="TOKEN",
        help="the token that fills rows (type 2), at either end or after --end",
    )
    group.add_argument(
        "--learn_others",
        action="store_true",
        help="with --until_last or --until_first, learn all tokens of a segment that "
        "has none of the given tokens; without this option it is an error",
    )


def run(options: argparse.Namespace) -> int:
    """Adds the types and prints the number of tokens of each type."""
    from rich.console import Console
    from rich.table import Table

    from prompt_tuning.data.tools.token_type_files import add_token_types

    refuse_bindings(options)
    rule = rule_from_options(options)
    typed_files = add_token_types(options.files, rule, replace=options.replace)
    table = Table("file")
    for name in ("rows", *(f"{i} {name}" for i, name in enumerate(NAMES))):
        table.add_column(name, justify="right")
    for typed in typed_files:
        numbers = (typed.rows, *typed.counts.tolist())
        table.add_row(typed.path.name, *(f"{number:,}" for number in numbers))
    console = Console()
    console.print(table)
    unlearned = sum(typed.unlearned for typed in typed_files)
    if unlearned:
        console.print(
            f"{unlearned:,} rows have no learned token (type 1 or 3); training rejects "
            "such rows",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    return 0


def rule_from_options(options: argparse.Namespace) -> "TypeRule":
    """Builds the type rule.

    Raises:
      InputError: if a token or a file cannot be used.
    """
    from prompt_tuning.data.text.tokenizers import load_tokenizer
    from prompt_tuning.data.tools.token_type_files import read_array
    from prompt_tuning.data.tools.type_rules import (
        AllCompletion,
        EndTokens,
        GivenTypes,
        PromptLengths,
        UntilSeparator,
    )

    _check_unused(options)
    if options.array is not None:
        return GivenTypes(read_array(options.array, ("rows", "length")), options.array)
    tokenizer = None if options.tokenizer is None else load_tokenizer(options.tokenizer)
    ends = EndTokens(
        *(
            None if token is None else token_id(token, tokenizer)
            for token in (options.end, options.padding)
        )
    )
    if options.all_completion:
        return AllCompletion(ends)
    if options.lengths is not None:
        lengths = options.lengths
        if lengths.lstrip("-").isdecimal():
            return PromptLengths(_number(lengths, "--lengths"), ends)
        return PromptLengths(read_array(lengths, ("rows",)), ends, lengths)
    which = "last" if options.until_last is not None else "first"
    tokens = options.until_last or options.until_first
    separators = tuple(token_id(token, tokenizer) for token in tokens)
    return UntilSeparator(separators, which, ends, options.learn_others)


def _check_unused(options: argparse.Namespace) -> None:
    """Checks that the rule uses all given options."""
    if options.learn_others and options.until_last is options.until_first is None:
        raise InputError(
            "--learn_others applies only with --until_last or --until_first, and "
            "neither was given: remove it"
        )
    if options.array is None:
        return
    if options.end is not None or options.padding is not None:
        raise InputError(
            "--array sets the type of every token: remove --end and --padding"
        )


def token_id(token: str, tokenizer: "Tokenizer | None") -> int:
    """Returns the id of a token, given as a number or as text.

    Raises:
      InputError: if a text is not one token, or there is no tokenizer for it.
    """
    if token.isdecimal():
        return _number(token, "a token")
    if tokenizer is None:
        raise InputError(
            f"the token {shown(token)} is not a number: give its id, or a --tokenizer"
        )
    by_name = {
        "EOS": tokenizer.eos_id,
        "BOS": tokenizer.bos_id,
        "PAD": tokenizer.pad_id,
    }
    if by_name.get(token) is not None:
        return by_name[token]
    ids = tokenizer.encode_continuation(token)
    if len(ids) == 1:
        return ids[0]
    raise InputError(
        f"the text {shown(token)} is {len(ids)} tokens ({shown(ids)}), expected one; "
        "give the token's id, or EOS, BOS or PAD"
    )


def _number(text: str, name: str) -> int:
    # Python does not convert thousands of digits.
    value = int(text) if len(text) < 20 else None
    if value is None or not 0 <= value <= MAXIMUM_INTEGER:
        raise InputError(
            f"{name} is {shown(text)}, expected a number from 0 to {MAXIMUM_INTEGER:,}"
        )
    return value
