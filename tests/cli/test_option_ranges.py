"""Every option of every command refuses values outside of its meaning."""

import argparse
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest

from prompt_tuning.cli.main import build_parser, main
from prompt_tuning.cli.option_types import (
    Number,
    find_subparsers,
    token_biases,
    token_ids,
)

RUN = ("--model", "bundled:skills-decoder")
PREPARE = ("in", "--output", "out", "--tokenizer", "t")
TEXTS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "--dev": ("prepare", PREPARE, ("1.5", "-1", "nan", "x")),
    "--test": ("prepare", PREPARE, ("1.5", "-0.1", "inf")),
    "--limit": ("memory", (*RUN, "--train", "train.jsonl"), ("0", "-1GiB", "nanGiB")),
    "--rows": ("show", ("train.jsonl", *RUN), ("-1", "3-1", "2:2", "9" * 24)),
    "--lengths": ("token-types", ("train.jsonl",), ("-1", "x.txt", "9" * 24)),
    "--until_last": ("token-types", ("rows.hdf5",), ("-1", "1.5")),
    "--until_first": ("token-types", ("rows.hdf5",), ("-1", "1.5")),
    "--end": ("token-types", ("rows.hdf5", "--until_last=5"), ("-1", "1.5")),
    "--padding": ("token-types", ("rows.hdf5", "--until_last=5"), ("-1", "1.5")),
    "--coordinator": (
        "train",
        (*RUN, "--train", "train.jsonl", "--processes=2", "--process=0"),
        ("a", "a:x", "a:0", "a:65536", ":1"),
    ),
    "--chat_date": ("show", ("train.jsonl", *RUN, "--chat"), ("2026-13-40", "soon")),
    "--method": ("train", (*RUN, "--train", "train.jsonl"), ("nothing", "")),
    "--budget": (
        "train",
        (*RUN, "--train", "train.jsonl", "--method=auto"),
        ("5", "0s", "-1m", "nanh", "infs", "x"),
    ),
    "--vary": ("sweep", (*RUN, "--train", "train.jsonl"), ("steps=0", "Run.steps=-1")),
}
"""Options whose text has a meaning: a command that has it, its other arguments, and
values that are refused. Other texts are names of files and keys, or go to a model."""
OPTIONS_OF_ANY_KIND = (argparse._HelpAction, argparse._VersionAction)


def options() -> Iterator[tuple[str, argparse.Action]]:
    for command, subparser in find_subparsers(build_parser()).items():
        for action in subparser._actions:
            if action.option_strings and not isinstance(action, OPTIONS_OF_ANY_KIND):
                yield command, action


def outside(action: argparse.Action) -> list[str]:
    """Returns values that an option cannot have, from its type.

    Raises:
      AssertionError: if it is a number without a range.
    """
    if action.choices is not None:
        return ["no such choice"]
    if isinstance(action.type, Number):
        return list(numbers(action.type))
    assert action.type not in (int, float), "state the range by option_types.numeric"
    if action.type is token_ids:
        return ["-1", "3,-1", "x", str(2**31)]
    if action.type is token_biases:
        return ["-1=2", "3=nan", "3=inf", "3=2e6", "3"]
    return ["a\0b"]


def numbers(kind: Number) -> Iterator[str]:
    bounds = kind.limits
    step = 1 if kind.whole else 0.5
    if not math.isinf(bounds.minimum):
        yield str(bounds.minimum if bounds.above else bounds.minimum - step)
    if not math.isinf(bounds.maximum):
        yield str(bounds.maximum if bounds.below else bounds.maximum + step)
    yield from ("nan", "inf", "-inf", "x", "", "9" * 400)


def refusal(capsys: Any, *arguments: str) -> str:
    try:
        code = main(arguments)
    except SystemExit as problem:
        code = problem.code
    printed = capsys.readouterr().err
    assert code == 2 and "Traceback" not in printed, (arguments, printed)
    return printed


@pytest.mark.parametrize(
    ("command", "action"),
    list(options()),
    ids=lambda value: value if isinstance(value, str) else value.option_strings[0],
)
def test_a_value_outside_of_its_meaning(command, action, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flag = action.option_strings[0]
    first, *others = ["x"] if action.nargs == 0 else outside(action)
    printed = refusal(capsys, command, f"{flag}={first}")
    assert "zero byte" in printed or flag in printed.splitlines()[-1], printed
    assert list(tmp_path.iterdir()) == []
    for value in others:
        assert callable(action.type)
        with pytest.raises(argparse.ArgumentTypeError):
            action.type(value)


@pytest.mark.parametrize("flag", TEXTS)
def test_a_number_within_a_text(flag, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "rows.hdf5").touch()
    command, others, values = TEXTS[flag]
    for value in values:
        printed = refusal(capsys, command, *others, f"{flag}={value}")
        message = re.split("^prompt-tuning ", printed, flags=re.MULTILINE)[-1]
        assert value.split("=")[0][:20] in message or flag in message, printed
    assert {path.name for path in tmp_path.iterdir()} == {"train.jsonl", "rows.hdf5"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--minimum_new_tokens=5", "--new_tokens=4"), "minimum_new_tokens is 5, exp"),
        (("--forced=1,2", "--new_tokens=1", "--forbidden=3"), "2 tokens are forced"),
        (("--forced=1", "--forbidden=1"), "token 1 is both forced and forbidden"),
        (("--top_p=0.5",), "the temperature is 0"),
        (("--beams=2", "--n=3"), "returned is 3, expected 1 to beams, which is 2"),
    ],
)
def test_two_options_that_do_not_fit(arguments, words, capsys):
    assert words in refusal(capsys, "generate", *RUN, *arguments, "text")


def test_the_order_of_processes(capsys):
    options = ("--coordinator=a:1", "--processes=2", "--process=2")
    assert "--process is 2 of --processes 2" in refusal(
        capsys, "train", *RUN, "--train", __file__, *options
    )
