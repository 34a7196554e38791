"""Generation at a terminal, in a pipe and as JSON."""

import io
import json

import numpy as np
import pytest

import prompt_tuning as pt
from prompt_tuning.cli.main import main
from prompt_tuning.cli.terminal_session import run_session
from prompt_tuning.core.errors import InputError
from prompt_tuning.texts.session import Session
from tests.support.small_runs import LENGTH


@pytest.fixture(scope="module")
def prompt(tmp_path_factory):
    file = tmp_path_factory.mktemp("generate") / "prompt.npy"
    np.save(file, np.random.default_rng(1).normal(size=(LENGTH, 16)).astype("f4"))
    return file


def options(files, prompt) -> list[str]:
    model = f"--gin.MODEL={str(files.decoder)!r}"
    return [
        *("generate", "--gin_file=models/checkpoint.gin", model),
        *(f"--prompt={prompt}", "--new_tokens=5"),
    ]


class Terminal(io.StringIO):
    """Standard input or output that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.slow
def test_json_python_and_the_terminal_agree(files, prompt, capsys, monkeypatch):
    command = options(files, prompt)
    assert main([*command, "--json", "ab=", "cde="]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    tuned = pt.load_tuned(prompt, base=files.decoder)
    completions = tuned.generate(["ab=", "cde="], new_tokens=5)
    texts = [completion.text for completion in completions]
    assert [line["output"] for line in lines] == texts
    assert [line["input"] for line in lines] == ["ab=", "cde="]
    # BOS is a token of the input, and a token is a letter.
    assert [line["input_tokens"] for line in lines] == [4, 5]
    assert {line["finish_reason"] for line in lines} <= {"stop", "length"}
    pieces = list(tuned.stream("ab=", sampling=pt.Sampling(new_tokens=5)))
    assert len(pieces) > 1 and "".join(pieces) == texts[0]
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    assert main([*command, "ab="]) == 0
    assert screen.getvalue() == f"ab={texts[0]}\n"
    screen.truncate(0)
    screen.seek(0)
    assert main([*command, "ab=", "cde="]) == 0
    assert screen.getvalue() == (
        f"--- 1 of 2\nab={texts[0]}\n--- 2 of 2\ncde={texts[1]}\n"
    )


class Echo(Session):
    """A session that repeats what is typed, except for a text that it refuses."""

    def __init__(self):
        self.resets = 0

    @property
    def hint(self) -> str:
        return "Type something."

    @property
    def names(self) -> tuple[str, ...]:
        return ("base",)

    def opening(self, text):
        return f"{text}: "

    def answer(self, text):
        if text == "bad":
            raise InputError("that is bad")
        yield from text

    def reset(self):
        self.resets += 1


def test_a_terminal_session_answers_each_line(capsys, monkeypatch):
    typed = iter(["one", "", "bad", "/reset", "two"])
    signs = []

    def read(sign):
        signs.append(sign)
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    session = Echo()
    run_session(session)
    printed, problems = capsys.readouterr()
    assert printed == "Type something.\none: one\ntwo: two\n\n"
    assert problems == "that is bad\n"
    assert signs == ["> "] * 6 and session.resets == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--system=x"], "add --chat"),
        (["--top_k=3"], "so top_k has no effect"),
        (["--chat"], "chat_template"),
    ],
)
def test_options_without_effect_are_refused(flags, message, files, prompt, capsys):
    assert main([*options(files, prompt), "a", *flags]) == 2
    assert message in capsys.readouterr().err
