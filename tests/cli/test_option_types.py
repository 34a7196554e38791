"""Numbers, names and other values of options that no command can use."""

import argparse
import re

import pytest

from prompt_tuning.cli import main as command_line
from prompt_tuning.cli.main import build_parser, main
from prompt_tuning.cli.option_types import find_subparsers, integer, number


def refused(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    return printed


def test_help_states_every_default_in_one_form():
    for name, subparser in find_subparsers(build_parser()).items():
        for action in subparser._actions:
            text = action.help or ""
            where = name, action.option_strings or action.dest
            assert not re.search(r"(the|by|By) default|\(\d+\)$", text), where
            assert text.count("(default: ") <= 1, where
            if isinstance(action.default, int) and not isinstance(action.default, bool):
                assert f"(default: {action.default})" in text, where


@pytest.mark.parametrize("value", ["9" * 24, "-2147483648", "9" * 5000, "1e3", "ten"])
def test_an_integer_out_of_bounds(value, capsys):
    message = refused(capsys, "generate", f"--new_tokens={value}", "text")
    assert "expected an integer from 1 to 2,147,483,647" in message
    assert len(message) < 1500


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999", "9" * 400, "x"])
def test_a_nonfinite_number(value, capsys):
    message = refused(capsys, "generate", f"--temperature={value}", "text")
    assert "expected 0 or a number from 1e-06 to 1,000,000" in message
    assert len(message) < 1500


def test_values_at_the_bounds_are_accepted():
    assert integer("2147483647") == 2**31 - 1
    assert integer("-2147483647") == 1 - 2**31
    assert number("-1.5e3") == -1500


def test_a_zero_byte(capsys):
    for arguments in (["train", "--gin_file", "a\0b"], ["configs", "\0"]):
        assert "zero byte" in refused(capsys, *arguments)


def test_a_long_value_of_a_choice_is_shortened(capsys):
    message = refused(capsys, "convert", "a", "b", "--to", "x" * 5000)
    assert "x" * 100 in message and len(message) < 3000


@pytest.mark.parametrize(
    ("option", "maximum"),
    [("--workers", 1000), ("--length", 1_000_000), ("--train_files", 10_000)],
)
def test_limits_of_options_of_prepare(option, maximum, capsys):
    given = ["prepare", "in", "--output", "out", "--tokenizer", "t"]
    for value in (maximum + 1, "9" * 24):
        message = refused(capsys, *given, f"{option}={value}")
        assert f"to {maximum:,}" in message


def test_special_tokens_that_are_nested_deeply(capsys):
    given = ["prepare", "in", "--output", "out", "--tokenizer", "t"]
    assert main([*given, "--special_tokens", "[" * 100_000]) == 2
    printed = capsys.readouterr().err
    assert "more than 100 levels deep" in printed and len(printed) < 1000


LONG = "n" * 300


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--gin_file", LONG],
        ["train", f"--gin.{LONG}=1"],
        ["train", f"--gin.{LONG}.x=1"],
        ["train", f"--gin.Run.{LONG}=1"],
        ["train", f"--gin.Run.model=@{LONG}()"],
        ["train", "--gin.Run.model=@Pretrained()", f"--gin.Pretrained.x=%{LONG}"],
        ["configs", LONG],
        ["inspect", "--run", LONG],
        ["evaluate", "--run", f"{LONG}/{LONG}"],
        ["convert", LONG, "target"],
        ["similar", LONG, LONG],
        ["recycle", LONG, "target"],
        ["show", LONG],
        ["memory", LONG],
        ["memory", "--limit", "9" * 400],
        ["memory", "--limit", f"1{LONG}"],
        ["sweep", "--vary", LONG],
        ["sweep", "--vary", f"{LONG}=1"],
        ["sweep", "--vary", "Run.seed=0", "--gin_file", LONG],
        ["token-types", LONG, "--all_completion"],
        ["token-types", LONG, "--until_last", "9" * 24],
        ["token-types", LONG, "--lengths", "9" * 24],
        ["token-types", LONG, "--lengths", "9" * 5000],
        ["prepare", LONG, "--output", LONG, "--tokenizer", LONG],
    ],
    ids=lambda arguments: " ".join(arguments)[:40],
)
def test_names_of_three_hundred_letters(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        code = main(arguments)
    except SystemExit as problem:
        code = problem.code
    printed = capsys.readouterr().err
    assert code == 2, printed
    assert "Traceback" not in printed and 0 < len(printed) < 2500
    assert list(tmp_path.iterdir()) == []


def raising(problem: Exception):
    def run(_: argparse.Namespace) -> int:
        raise problem

    return run


@pytest.mark.parametrize(
    ("problem", "code", "words"),
    [
        (OSError(36, "File name too long", "n" * 300), 2, "File name too long"),
        (IsADirectoryError(21, "Is a directory", "data"), 2, "data: Is a directory"),
        (PermissionError(30, "Read-only file system", "f"), 2, "f: Read-only"),
        (OSError(28, "No space left on device", "run/x"), 1, "run/x: No space left"),
        (OSError("odd"), 2, "odd"),
        (MemoryError("8 GiB"), 1, "the memory does not suffice: 8 GiB"),
        (RuntimeError("RESOURCE_EXHAUSTED: 9 GB"), 1, "the memory does not suffice"),
    ],
)
def test_machine_errors(problem, code, words, capsys, monkeypatch):
    command = command_line.load_commands()["memory"]
    monkeypatch.delattr(command, "check")
    monkeypatch.setattr(command, "run", raising(problem))
    assert main(["memory"]) == code
    printed = capsys.readouterr().err
    assert words in printed and len(printed) < 400 and "Traceback" not in printed


def test_other_errors_are_not_hidden(monkeypatch):
    command = command_line.load_commands()["memory"]
    monkeypatch.delattr(command, "check")
    monkeypatch.setattr(command, "run", raising(RuntimeError("a defect")))
    with pytest.raises(RuntimeError, match="a defect"):
        main(["memory"])


@pytest.fixture
def data(tmp_path) -> list[str]:
    """Options of a model and of data that exist."""
    file = tmp_path / "train.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\n')
    return ["--model=bundled:skills-decoder", f"--train={file}"]


@pytest.mark.parametrize(
    "coordinator", ["", ":1", "host:", "host:99999", "host:" + "9" * 5000, "host:１"]
)
def test_an_invalid_address(coordinator, data, capsys):
    options = [f"--coordinator={coordinator}", "--processes=2", "--process=0"]
    assert main(["train", *data, *options]) == 2
    assert "expected the HOST:PORT" in capsys.readouterr().err
