"""The command `prompt-tuning token-types`: says which tokens of HDF5 rows are learned.

What says which options there are imports nothing heavy, so that help is instant.
"""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from prompt_tuning.core.errors import InputError

if TYPE_CHECKING:
    from prompt_tuning.data.text.tokenizers import Tokenizer
    from prompt_tuning.data.tools.type_rules import TypeRule

DESCRIPTION = (
    "Adds token_type_ids (0 prompt, 1 completion, 2 padding, 3 separator) to HDF5 "
    "files that hold input_ids, by a rule or from an array. A file is replaced only by "
    "a copy that was read back and compared with it. `prepare --add-token-types FILE "
    "...` is the same command."
)
NAMES = ("prompt", "completion", "padding", "separator")


def spelt_out(arguments: Sequence[str]) -> list[str]:
    """`prepare --add-token-types` as the command that it is; others as they are."""
    flag = "--add-token-types"
    if arguments[:1] != ["prepare"] or flag not in arguments:
        return list(arguments)
    return ["token-types", *(x for x in arguments[1:] if x != flag)]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.description = DESCRIPTION
    parser.add_argument("files", nargs="+", metavar="FILE", help="an HDF5 file")
    add_rules(parser.add_argument_group("which tokens are given"))
    parser.add_argument(
        "--replace", action="store_true", help="replace types that a file has already"
    )
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="lets tokens be written as text: a file, or the folder of a checkpoint",
    )


def add_rules(group) -> None:
    """Adds the options that say the rule, of which one of five is needed."""
    rule = group.add_mutually_exclusive_group(required=True)
    for which in ("last", "first"):
        rule.add_argument(
            f"--until_{which}",
            nargs="+",
            metavar="TOKEN",
            help=f"all up to the {which} of these tokens is prompt, in each article",
        )
    rule.add_argument(
        "--lengths",
        metavar="N",
        help="the first N tokens of a row are prompt; or a .npy file of [rows] numbers",
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
        help="the token that closes an article (type 3), such as EOS; each article of "
        "a row has a prompt of its own. The first token of a row closes nothing",
    )
    group.add_argument(
        "--padding", metavar="TOKEN", help="the token that fills rows (type 2)"
    )
    group.add_argument(
        "--learn_others",
        action="store_true",
        help="with --until_last or --until_first, learn all of an article that has "
        "none of the tokens; else it is refused",
    )


def token_types(options: argparse.Namespace) -> int:
    """Adds the types, and prints how many tokens are of each."""
    from rich.console import Console
    from rich.table import Table

    from prompt_tuning.data.tools.token_type_files import add_token_types

    if options.bindings:
        raise InputError(
            f"token-types reads no config, so nothing uses {options.bindings}"
        )
    found = add_token_types(options.files, rule_of(options), replace=options.replace)
    table = Table("file")
    for name in ("rows", *(f"{i} {name}" for i, name in enumerate(NAMES))):
        table.add_column(name, justify="right")
    for typed in found:
        numbers = (typed.rows, *typed.counts.tolist())
        table.add_row(typed.path.name, *(f"{number:,}" for number in numbers))
    console = Console()
    console.print(table)
    unlearned = sum(typed.unlearned for typed in found)
    if unlearned:
        console.print(
            f"{unlearned:,} rows have nothing to learn (no token of type 1 or 3): such "
            "rows are refused in training",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    return 0


def rule_of(options: argparse.Namespace) -> "TypeRule":
    """The rule that options say.

    Raises:
      InputError: if a token or a file cannot be used.
    """
    from prompt_tuning.data.text.tokenizers import load_tokenizer
    from prompt_tuning.data.tools.token_type_files import read_array
    from prompt_tuning.data.tools.type_rules import (
        AllCompletion,
        Ends,
        GivenTypes,
        PromptLengths,
        UntilSeparator,
    )

    _refuse_unused(options)
    if options.array is not None:
        return GivenTypes(read_array(options.array, ("rows", "length")))
    tokenizer = None if options.tokenizer is None else load_tokenizer(options.tokenizer)
    ends = Ends(
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
            return PromptLengths(int(lengths), ends)
        return PromptLengths(read_array(lengths, ("rows",)), ends)
    which = "last" if options.until_last is not None else "first"
    tokens = options.until_last or options.until_first
    separators = tuple(token_id(token, tokenizer) for token in tokens)
    return UntilSeparator(separators, which, ends, options.learn_others)


def _refuse_unused(options: argparse.Namespace) -> None:
    """Refuses options that the rule has no use for."""
    if options.learn_others and options.until_last is options.until_first is None:
        raise InputError(
            "--learn_others is of articles without a token of --until_last or "
            "--until_first, and neither was given: leave it out"
        )
    if options.array is None:
        return
    if options.end is not None or options.padding is not None:
        raise InputError(
            "--array says the type of every token: leave --end and --padding out"
        )


def token_id(token: str, tokenizer: "Tokenizer | None") -> int:
    """The id of a token that is written as a number, or as text.

    Raises:
      InputError: if a text is not one token, or there is no tokenizer to say.
    """
    if token.isdecimal():
        return int(token)
    if tokenizer is None:
        raise InputError(
            f"the token {token!r} is no number: write its id, or name the --tokenizer"
        )
    named = {"EOS": tokenizer.eos_id, "BOS": tokenizer.bos_id, "PAD": tokenizer.pad_id}
    if named.get(token) is not None:
        return named[token]
    ids = tokenizer.encode_continuation(token)
    if len(ids) == 1:
        return ids[0]
    raise InputError(
        f"the text {token!r} is {len(ids)} tokens ({ids}), expected one; name a token "
        "by its id, or as EOS, BOS or PAD"
    )
