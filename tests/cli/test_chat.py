"""A conversation at a terminal, with adapters chosen by name."""

import json
import re
import shutil

import numpy as np
import pytest

from prompt_tuning.cli.main import main
from tests.support.small_runs import LENGTH

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}={% endif %}"
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def model(files, tmp_path_factory):
    """The small decoder with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(files.decoder, folder)
    settings = folder / "tokenizer_config.json"
    content = json.loads(settings.read_text()) if settings.exists() else {}
    settings.write_text(json.dumps(content | {"chat_template": TEMPLATE}))
    return folder


def answers(capsys, monkeypatch, lines: list[str], *options: str) -> list[str]:
    """Returns what is printed for each line that is typed, after the hint."""
    typed = iter(lines)
    monkeypatch.setattr("builtins.input", lambda _: next(typed, None) or end())
    assert main(["chat", "--new_tokens=3", *options]) == 0
    captured = capsys.readouterr()
    # Where the output is not a terminal, nothing else shows that the command works.
    assert captured.err.startswith("starting\nopening the model\n")
    hint, *printed = captured.out.splitlines()
    assert "/adapter NAME" in hint and "base, tuned" in hint
    return printed


def end() -> str:
    raise EOFError


@pytest.mark.slow
def test_each_adapter_answers_as_generate_does(model, tmp_path, capsys, monkeypatch):
    prompt = tmp_path / "prompt.npy"
    rows = 9 * np.random.default_rng(1).normal(size=(LENGTH, 16)).astype("f4")
    np.save(prompt, rows)
    expected = []
    for own in ([], [f"--prompt={prompt}"]):
        command = ["generate", f"--model={model}", "--new_tokens=3", "--chat"]
        assert main([*command, *own, "ab"]) == 0
        expected.append(capsys.readouterr().out.removesuffix("\n"))
    assert expected[0] != expected[1]
    lines = ["ab", "/reset", "/adapter tuned", "ab"]
    given = [f"--model={model}", f"--adapter=tuned={prompt}"]
    printed = answers(capsys, monkeypatch, lines, *given)
    report = "answers come from tuned now"
    assert printed == [expected[0], report, expected[1], ""]


def test_answers_match_an_expression(model, capsys, monkeypatch):
    pytest.importorskip("llguidance", reason="needs the extra guided")
    lines = iter(["ab"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines, None) or end())
    options = ["--new_tokens=9", "--regex=b[ab]{2}", "--temperature=2"]
    assert main(["chat", f"--model={model}", *options]) == 0
    assert re.fullmatch("b[ab]{2}", capsys.readouterr().out.splitlines()[1])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--adapter=tuned", "expected NAME=PATH"),
        ("--adapter=tuned=missing", "does not exist"),
        ("--top_p=0.5", "has no effect"),
        ("--json_schema=missing.json", "missing.json is missing"),
        ("--system=x", "chat_template"),
    ],
)
def test_what_cannot_be_used_is_refused(option, message, model, files, capsys):
    folder = files.decoder if message == "chat_template" else model
    assert main(["chat", f"--model={folder}", option]) == 2
    assert message in capsys.readouterr().err
