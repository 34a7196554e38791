"""A killed preparation is resumed and writes the bytes of an uninterrupted one."""

import datetime
import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.preparation import preparation as module
from prompt_tuning.data.preparation import worker_pool
from prompt_tuning.data.preparation.encoding_worker import EncodingWorker
from prompt_tuning.data.preparation.preparation import prepare
from prompt_tuning.data.preparation.preparation_settings import (
    Preparation,
    Share,
    Splits,
    TextFormat,
    TokenizerChoice,
)
from prompt_tuning.data.preparation.scratch_directory import (
    open_scratch,
    scratch_path,
)
from prompt_tuning.data.preparation.worker_pool import run_tasks
from tests.support.exhaustive import sample
from tests.support.prepared_files import snapshot
from tests.support.small_tokenizer import CHAT, write_tokenizer

ROOT = Path(__file__).parents[3]
LINES = 3000


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_tokenizer(folder / "tokenizer")
    lines = (
        json.dumps({"prompt": f"the {i} and", "completion": "a the " * (i % 50)})
        if i % 300 != 7
        else "broken"
        for i in range(LINES)
    )
    (folder / "lines.jsonl").write_text("\n".join(lines))
    return folder


def preparation(inputs, output, **choices):
    standard = {
        "tokenizer": TokenizerChoice(str(inputs / "tokenizer")),
        "length": 64,
        "packing": "greedy::truncate_left",
        "skip_malformed": True,
        "splits": Splits(Share(count=100), Share(ratio=0.02), 3, shuffle=True),
    }
    return Preparation(
        (str(inputs / "lines.jsonl"),),
        str(output),
        **(standard | choices),
    )


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "out"
    return snapshot(prepare(preparation(inputs, output), workers=1))


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch):
    """Makes tasks small; the division into tasks does not change the output."""
    monkeypatch.setattr(worker_pool, "TASK_RECORDS", 300)


class Killed(BaseException):
    """Simulates a kill: nothing catches it."""


def stop(*_):
    raise Killed


@pytest.mark.exhaustive
@pytest.mark.parametrize("after", sample(2, [1, 4, 11]))
def test_the_bytes_are_the_same_after_any_interruption(
    inputs, whole, tmp_path, monkeypatch, after
):
    output = tmp_path / "out"

    def stopped(*arguments):
        for number, answer in enumerate(run_tasks(*arguments)):
            if number == after:
                raise Killed
            yield answer

    with monkeypatch.context() as patch:
        patch.setattr(worker_pool, "run_tasks", stopped)
        with pytest.raises(Killed):
            prepare(preparation(inputs, output), workers=1)
    assert not output.exists() and scratch_path(output).exists()
    resumed = 0

    def counted(*arguments):
        nonlocal resumed
        for answer in run_tasks(*arguments):
            resumed += 1
            yield answer

    monkeypatch.setattr(worker_pool, "run_tasks", counted)
    prepare(preparation(inputs, output), workers=1)
    assert snapshot(output) == whole
    assert list(tmp_path.iterdir()) == [output]
    assert resumed > 0


@pytest.mark.slow
def test_a_shard_that_a_power_cut_has_damaged_is_encoded_again(
    inputs, whole, tmp_path, monkeypatch
):
    output = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_output", stop)
        with pytest.raises(Killed):
            prepare(preparation(inputs, output), workers=1)
    shards = sorted((scratch_path(output) / "shards").iterdir())
    assert len(shards) > 5
    shards[1].write_bytes(b"")
    shards[2].write_bytes(shards[2].read_bytes()[:-100])
    content = bytearray(shards[3].read_bytes())
    content[200] ^= 1
    shards[3].write_bytes(content)
    (shards[4].with_suffix(".tmp")).write_bytes(b"torn")
    prepare(preparation(inputs, output), workers=1)
    assert snapshot(output) == whole


@pytest.mark.slow
def test_finished_shards_are_not_encoded_again(inputs, whole, tmp_path, monkeypatch):
    output = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_output", stop)
        with pytest.raises(Killed):
            prepare(preparation(inputs, output), workers=1)
    monkeypatch.setattr(EncodingWorker, "__call__", stop)
    assert snapshot(prepare(preparation(inputs, output), workers=1)) == whole


@pytest.mark.slow
def test_a_preparation_of_an_older_version_is_refused(inputs, tmp_path):
    folder = scratch_path(tmp_path / "out")
    folder.mkdir()
    (folder / "identity.json").write_text('{"format": 2}')
    request = preparation(inputs, tmp_path / "out")
    with pytest.raises(InputError, match="of another version of this package: finish"):
        prepare(request, workers=1)
    prepare(request, workers=1, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_another_preparation_is_not_overwritten_without_force(
    inputs, tmp_path, monkeypatch
):
    output = tmp_path / "out"

    with monkeypatch.context() as patch:
        patch.setattr(worker_pool, "run_tasks", stop)
        with pytest.raises(Killed):
            prepare(preparation(inputs, output), workers=1)
    longer = preparation(inputs, output, length=128)
    with pytest.raises(InputError, match="other settings or with inputs that have"):
        prepare(longer, workers=1)
    assert scratch_path(output).exists()
    prepare(longer, workers=1, force=True)
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.exhaustive
def test_preparation_resumes_with_its_own_tokenizer_next_to_the_output(
    inputs, whole, tmp_path, monkeypatch
):
    """The tokenizer's folder contains the output, its lock and unrelated files."""
    folder = write_tokenizer(tmp_path / "tokenizer")
    choice = TokenizerChoice(str(folder))
    request = preparation(inputs, folder / "out", tokenizer=choice)
    with monkeypatch.context() as patch:
        patch.setattr(worker_pool, "run_tasks", stop)
        with pytest.raises(Killed):
            prepare(request, workers=1)
    (folder / "notes.txt").write_text("mine")
    assert snapshot(prepare(request, workers=1)) == whole


@pytest.mark.exhaustive
def test_a_template_sees_the_day_on_which_the_work_began(inputs, tmp_path, monkeypatch):
    template = tmp_path / "template.jinja"
    template.write_text("{{ strftime_now('%d.%m.%Y') }}" + CHAT)

    def asked(name, date):
        text = TextFormat(chat=True, chat_template=str(template), chat_date=date)
        return preparation(inputs, tmp_path / name, text=text)

    def at(date):
        today = types.SimpleNamespace(today=lambda: datetime.date.fromisoformat(date))
        monkeypatch.setattr(module, "datetime", types.SimpleNamespace(date=today))

    monday, tuesday = "2026-07-27", "2026-07-28"
    first = snapshot(prepare(asked("monday", monday), workers=1))
    second = snapshot(prepare(asked("tuesday", tuesday), workers=1))
    assert first["train_1_of_3.hdf5"] != second["train_1_of_3.hdf5"]
    at(monday)
    with monkeypatch.context() as patch:
        patch.setattr(worker_pool, "run_tasks", stop)
        with pytest.raises(Killed):
            prepare(asked("out", None), workers=1)
    at(tuesday)
    assert snapshot(prepare(asked("out", None), workers=1)) == first
    assert snapshot(prepare(asked("late", None), workers=1)) == second


@pytest.mark.parametrize("changed", ["template.jinja", "tokenizer_config.json"])
def test_a_changed_template_or_sibling_file_restarts_preparation(
    inputs, tmp_path, monkeypatch, changed
):
    folder = write_tokenizer(tmp_path / "tokenizer")
    template = folder / "template.jinja"
    template.write_text(CHAT)
    request = preparation(
        inputs,
        tmp_path / "out",
        tokenizer=TokenizerChoice(str(folder / "tokenizer.json")),
        text=TextFormat(chat=True, chat_template=str(template)),
    )
    with monkeypatch.context() as patch:
        patch.setattr(worker_pool, "run_tasks", stop)
        with pytest.raises(Killed):
            prepare(request, workers=1)
    file = folder / changed
    file.write_text(file.read_text() + "\n")
    with pytest.raises(InputError, match="other settings or with inputs that have"):
        prepare(request, workers=1)


def test_one_output_is_prepared_by_one_process(inputs, tmp_path):
    output = tmp_path / "out"
    with (
        open_scratch(output),
        pytest.raises(InputError, match=r"output .* is being written by"),
    ):
        prepare(preparation(inputs, output), workers=1)


@pytest.mark.exhaustive
def test_a_killed_command_resumes_and_leaves_no_process(inputs, whole, tmp_path):
    output = tmp_path / "out"
    command = [sys.executable, "-m", "prompt_tuning.cli.main", "prepare"]
    command += [str(inputs / "lines.jsonl"), "--output", str(output)]
    command += ["--tokenizer", str(inputs / "tokenizer"), "--length", "64"]
    command += ["--packing", "greedy::truncate_left", "--on_malformed", "skip"]
    command += ["--dev", "100", "--test", "0.02", "--train_files", "3", "--shuffle"]
    command += ["--workers", "2"]
    index = scratch_path(output) / "index"
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        while not index.exists() and process.poll() is None:
            time.sleep(0.005)
        time.sleep(1.0)
        children = _children(process.pid)
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while any(map(_runs, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_runs, children))
    if not output.exists():
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert snapshot(output) == whole


def _children(process):
    text = Path(f"/proc/{process}/task/{process}/children")
    return [int(child) for child in text.read_text().split()] if text.exists() else []


def _runs(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{process}/stat")
    try:
        return state.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
