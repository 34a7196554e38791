"""`generate --input`: lines of a file, its options, and a process that is killed."""

import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from prompt_tuning.cli import generate
from prompt_tuning.cli.main import main
from prompt_tuning.core.resumable_lines import LineWriter, partial_file, settings_file
from tests.support.small_runs import (
    COMPILATION_CACHE,
    JOIN_MESSAGES,
    LENGTH,
    add_chat_template,
)

WORDS = ["ab=", "cde=", "f=", "ghij=", "kl="]
WAIT = 180.0
"""Maximum number of seconds until a process has written its first lines."""


@pytest.fixture(scope="module")
def prompt(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("lines") / "prompt.npy"
    rows = 9 * np.random.default_rng(1).normal(size=(LENGTH, 16)).astype("f4")
    np.save(file, rows)
    return file


@pytest.fixture(scope="module")
def chat_model(files, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "model"
    return add_chat_template(Path(shutil.copytree(files.decoder, folder)))


def write_rows(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def command(files, *options) -> list[str]:
    given = [f"--model={files.decoder}", "--new_tokens=4", *options]
    return ["generate", *map(str, given)]


def printed(capsys, arguments: list[str]) -> list[dict]:
    capsys.readouterr()
    assert main(arguments) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.exhaustive
def test_a_killed_process_is_continued_to_the_same_bytes(files, tmp_path, capsys):
    rows = [{"prompt": word} for word in WORDS * 80]
    source = write_rows(tmp_path / "in.jsonl", rows)
    drawn = ("--temperature=1.5", "--batch_size=4", f"--input={source}")
    once, killed = tmp_path / "once.jsonl", tmp_path / "killed.jsonl"
    arguments = command(files, *drawn, f"--output={killed}")
    process = subprocess.Popen(
        [sys.executable, "-m", "prompt_tuning", *arguments],
        env=os.environ | COMPILATION_CACHE,
        cwd=Path(__file__).parents[2],
    )
    deadline = time.monotonic() + WAIT
    partial = partial_file(killed)
    while not (partial.exists() and partial.stat().st_size > 200):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = partial.read_bytes().count(b"\n")
    assert 0 < done < len(rows) and not killed.exists()
    assert main(arguments) == 0
    assert f"{len(rows):,} lines, {done:,} of them from an" in capsys.readouterr().out
    assert main(command(files, *drawn, f"--output={once}")) == 0
    assert killed.read_bytes() == once.read_bytes()
    assert not partial.exists() and not settings_file(killed).exists()
    results = [json.loads(line) for line in once.read_text().splitlines()]
    assert [result["line"] for result in results] == list(range(1, len(rows) + 1))


@pytest.mark.slow
def test_a_template_with_the_date_gets_the_day_on_which_the_lines_were_begun(
    files, tmp_path, monkeypatch
):
    greeting = "{% if strftime_now('%Y') == '2001' %}ab{% endif %}"
    model = Path(shutil.copytree(files.decoder, tmp_path / "model"))
    add_chat_template(model, greeting + JOIN_MESSAGES)
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": word} for word in WORDS])
    once, resumed = tmp_path / "once.jsonl", tmp_path / "resumed.jsonl"
    arguments = ["generate", f"--model={model}", "--chat", "--new_tokens=4"]
    arguments += ["--temperature=1.5", f"--input={source}"]
    of_2001 = mock.Mock(**{"date.today.return_value": datetime.date(2001, 2, 3)})
    with monkeypatch.context() as patched:
        patched.setattr(generate, "datetime", of_2001)
        assert main([*arguments, f"--output={once}"]) == 0
        patched.setattr(LineWriter, "finish", lambda self: sys.exit(1))
        with pytest.raises(SystemExit):
            main([*arguments, f"--output={resumed}"])
    partial = partial_file(resumed)
    partial.write_text(partial.read_text().splitlines(keepends=True)[0])
    assert main([*arguments, f"--output={resumed}"]) == 0
    assert resumed.read_bytes() == once.read_bytes()
    assert main([*arguments, f"--output={resumed}", "--force"]) == 0
    assert resumed.read_bytes() != once.read_bytes()


@pytest.mark.slow
def test_lines_are_continued_as_texts_and_messages_as_chats(
    files, prompt, chat_model, tmp_path, capsys
):
    model = ["generate", f"--model={chat_model}", "--new_tokens=4", "--json"]
    named = f"--adapter=tuned={prompt}"
    texts = printed(capsys, [*model, *WORDS[:2]])
    tuned = printed(capsys, [*model, named, *WORDS[:2]])
    chats = printed(capsys, [*model, named, "--use_adapter=base", "--chat", "ab="])
    loaded = printed(capsys, [*model, f"--prompt={prompt}", *WORDS[:2]])
    assert tuned == loaded and tuned != texts
    rows = [
        {"prompt": WORDS[0], "adapter": "base"},
        {"prompt": WORDS[1], "note": [1]},
        {"messages": [{"role": "user", "content": "ab="}], "adapter": "base"},
    ]
    source = write_rows(tmp_path / "in.jsonl", rows)
    lines = printed(capsys, [*model, named, f"--input={source}"])
    assert [line.pop("line") for line in lines] == [1, 2, 3]
    records = [line.pop("record") for line in lines]
    assert records == [{"adapter": "base"}, {"note": [1]}, {"adapter": "base"}]
    given = [line.pop("input") for line in lines]
    assert given == [*WORDS[:2], rows[2]["messages"]]
    for line, expected in zip(lines, [texts[0], tuned[1], chats[0]], strict=True):
        assert line == {key: x for key, x in expected.items() if key != "input"}


@pytest.mark.slow
def test_samples_and_beams_of_texts(files, capsys):
    several = printed(
        capsys, command(files, "--n=2", "--temperature=1.5", "--json", *WORDS[:2])
    )
    assert [len(each["outputs"]) for each in several] == [2, 2]
    assert len({each["output"] for x in several for each in x["outputs"]}) > 1
    (alone,) = printed(
        capsys, command(files, "--n=2", "--temperature=1.5", "--json", WORDS[0])
    )
    assert alone == several[0]
    (best,) = printed(capsys, command(files, "--beams=3", "--json", "ab="))
    (beams,) = printed(capsys, command(files, "--beams=3", "--n=3", "--json", "ab="))
    assert best["output"] == beams["outputs"][0]["output"]
    assert best["score"] == max(each["score"] for each in beams["outputs"])
    (forced,) = printed(
        capsys, command(files, "--forced=5,6", "--logprobs=0", "--json", "ab=")
    )
    assert [token["id"] for token in forced["logprobs"]][:2] == [5, 6]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--output=x"], "add --input"),
        (["--input=in", "--output=in"], "is the file of --input"),
        (["--input=in", "--output=old"], "already exists"),
        (["--input=in", "--force"], "add --output"),
        (["--input=in", "text"], "leave out one of them"),
        (["--input=missing"], "does not exist"),
        (["--beams=2", "--temperature=1"], "--temperature has no effect"),
        (["--beams=2", "--seed=0"], "--seed has no effect"),
        (["--beams=2", "--n=3"], "returned is 3"),
        (["--length_penalty=1"], "add --beams"),
        (["--n=2"], "set a temperature"),
        (["--logprobs=1"], "add --json"),
        (["--adapter=a=old", "--adapter=b=old"], "choose that of the texts"),
        (["--adapter=base=old"], "choose another name"),
        (["--use_adapter=trains"], "did you mean trained"),
        (["--use_adapter=trained"], "no adapter is named 'trained'"),
        (["--logit_bias=5"], "expected ID=NUMBER"),
        (["--forced=x"], "expected an integer"),
        (["--forced=9999"], "forced names token 9999"),
        (["--min_p=0.1"], "min_p has no effect"),
        (
            ["--gin.Run.mesh=@MeshShape()", "--n=2", "--temperature=1"],
            "a row has one continuation",
        ),
    ],
)
def test_contradictions_are_refused(
    options, message, files, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write_rows(Path("in"), [{"prompt": "ab="}])
    Path("old").write_text("mine")
    texts = [] if options[0].startswith("--input") else ["ab="]
    try:
        code = main(command(files, *options, *texts))
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert Path("old").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "old"]


def test_a_wrong_line_is_reported_before_anything_is_written(files, tmp_path, capsys):
    rows = [{"prompt": "ab="}, {"prompt": "ab=", "seed": "x"}]
    source = write_rows(tmp_path / "in.jsonl", rows)
    output = tmp_path / "out.jsonl"
    assert main(command(files, f"--input={source}", f"--output={output}")) == 2
    (problem,) = capsys.readouterr().err.splitlines()
    assert f"{source}, line 2 has seed = 'x', expected a whole number" in problem
    assert list(tmp_path.iterdir()) == [source]


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from prompt_tuning.cli.main import main\n"
        "try: main(['generate', '--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('jax', 'numpy', 'gin', 'rich') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("[]\n")
