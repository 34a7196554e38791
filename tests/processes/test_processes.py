"""Several processes are one run: the same numbers, one writer, one end."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from prompt_tuning import processes
from prompt_tuning.adapters.prompt_files import read_prompt
from prompt_tuning.checkpoints.run_store.checkpoint_names import FOLDER
from prompt_tuning.checkpoints.run_store.checkpoint_store import CheckpointStore
from prompt_tuning.cli.main import main
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.interrupts import INTERRUPTED
from prompt_tuning.processes import crash_reporter
from prompt_tuning.processes.group import Launch
from prompt_tuning.processes.heartbeat import DONE, STOPPED, HeartbeatMonitor
from tests.support import several_processes
from tests.support.exhaustive import sample
from tests.support.small_runs import UPPER, logged, write_pairs

ON_ALL = "--gin.Run.mesh=@MeshShape()"
TEXTS = ["hello=", "a=", "world="]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts processes, and ends those that a test leaves running."""
    started = []

    def begin(*commands: list[str], devices: int = 1, **choices):
        folder = tmp_path_factory.mktemp("processes") / "printed"
        started.append(several_processes.start(folder, commands, devices, **choices))
        return started[-1]

    yield begin
    for several in started:
        several.end()


def training(files, directory: Path, **macros) -> list[str]:
    choices = {"Run__save_every": 2, "Run__keep_last": 3, "DataSource__buckets": 2}
    choices |= macros
    return ["train", *files.arguments(directory, **choices), ON_ALL]


@pytest.fixture(scope="module")
def run_of_two(files, start, tmp_path_factory) -> Path:
    """A run of six steps by two processes."""
    directory = tmp_path_factory.mktemp("two") / "run"
    start(*[training(files, directory)] * 2).succeeded()
    return directory


def losses(directory: Path) -> list[float]:
    return [line["loss"] for line in logged(directory) if "loss" in line]


def prompt(directory: Path, step: int = 6) -> np.ndarray:
    return read_prompt(directory / FOLDER / f"checkpoint_{step}")


@pytest.mark.slow
def test_two_processes_train_as_two_devices_of_one_process(
    files, start, run_of_two, tmp_path
):
    start(training(files, tmp_path / "run"), devices=2).succeeded()
    np.testing.assert_allclose(prompt(run_of_two), prompt(tmp_path / "run"), atol=1e-6)
    np.testing.assert_allclose(losses(run_of_two), losses(tmp_path / "run"), rtol=1e-6)
    # Each line once: only the first process writes.
    assert [x["step"] for x in logged(run_of_two) if "loss" in x] == [1, 2, 3, 4, 5, 6]
    assert losses(run_of_two)[0] != losses(run_of_two)[5]


@pytest.mark.exhaustive
def test_a_run_continues_on_other_numbers_of_processes(
    files, start, run_of_two, tmp_path
):
    run = tmp_path / "run"
    shutil.copytree(run_of_two, run)
    for count, step in ((4, 2), (1, 4)):
        for later in CheckpointStore(run).steps():
            if later > step:
                shutil.rmtree(run / FOLDER / f"checkpoint_{later}")
        arguments = training(files, run, Run__save_every=2)
        started = start(*[arguments] * count).succeeded()
        assert f"resuming from step {step}" in started.printed(0)
        np.testing.assert_allclose(losses(run), losses(run_of_two), rtol=1e-5)
        np.testing.assert_allclose(prompt(run), prompt(run_of_two), atol=1e-5)


@pytest.mark.exhaustive
def test_two_processes_evaluate_and_generate_as_one(
    files, start, run_of_two, tmp_path, capsys
):
    command = ["evaluate", "--run", str(run_of_two)]
    files_of = [tmp_path / f"{count}.jsonl" for count in (1, 2)]
    alone, together = ([*command, "--predictions", str(file)] for file in files_of)
    evaluated = start(*[together] * 2)
    generate = ["generate", "--run", str(run_of_two), "--new_tokens", "5"]
    generated = start(*[[*generate, *TEXTS]] * 2, slurm=True)
    assert main([*alone, "--gin.Run.mesh=None"]) == 0
    assert main([*generate, *TEXTS, "--gin.Run.mesh=None"]) == 0
    evaluated.succeeded()
    actual = [
        [json.loads(line) for line in file.read_text().splitlines()]
        for file in files_of
    ]
    assert len(actual[0]) == len(UPPER[32:])
    for one, two in zip(*actual, strict=True):
        assert two.pop("scores") == pytest.approx(one.pop("scores"), rel=1e-5)
        assert two == one
    lines = capsys.readouterr().out.splitlines()
    expected = [line for line in lines if line.startswith(tuple(TEXTS))]
    printed = generated.succeeded().printed(0).splitlines()
    assert [line for line in printed if "Gloo" not in line] == expected
    assert all("Gloo" in line for line in generated.printed(1).splitlines())


def endless(files, directory: Path) -> list[str]:
    macros = {"Run__evaluation": None, "Run__keep_best": None, "DataSource__buckets": 1}
    return training(files, directory, Run__steps=10**6, Run__save_every=5, **macros)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, INTERRUPTED)]
)
def test_a_signal_to_one_stops_all_after_the_same_step(
    number, code, files, start, tmp_path
):
    started = start(*[endless(files, tmp_path / "run")] * 2)
    started.wait_for(lambda: (tmp_path / "run" / FOLDER / "checkpoint_5").is_dir())
    started.processes[1].send_signal(number)
    assert started.codes() == [0, code]
    step = int(re.findall(r"stopped at step (\d+)", started.printed(0))[0])
    assert CheckpointStore(tmp_path / "run").steps()[-1] == step
    assert logged(tmp_path / "run")[-1]["step"] == step


@pytest.mark.exhaustive
@pytest.mark.parametrize("killed", sample(1, [0, 1]))
def test_the_other_processes_end_and_report_a_killed_one(
    killed, files, start, tmp_path
):
    started = start(*[endless(files, tmp_path / "run")] * 2)
    started.wait_for(lambda: (tmp_path / "run" / FOLDER / "checkpoint_5").is_dir())
    started.processes[killed].kill()
    before = time.monotonic()
    codes = started.codes()
    assert time.monotonic() - before < 60
    other = 1 - killed
    # JAX's runtime itself ends a process that has lost process 0.
    assert codes[other] == 3 if killed else codes[other] not in (0, None)
    last = started.last_said(other)
    assert last.startswith(f"prompt-tuning: process {killed} of 2 has ")
    assert "the same command continues from its last checkpoint" in last
    assert CheckpointStore(tmp_path / "run").latest_valid() is not None


@pytest.mark.exhaustive
def test_processes_with_different_settings_are_refused_on_each(files, start, tmp_path):
    arguments = training(files, tmp_path / "run")
    other = [*arguments, "--gin.Run.seed=1"]
    started = start(arguments, other)
    assert started.codes() == [2, 2]
    for number in range(2):
        errors = started.errors(number)
        assert "process 1 of 2 has other settings than process 0" in errors
        assert "+Run.seed = 1" in errors
    assert not (tmp_path / "run").exists()


@pytest.mark.exhaustive
def test_processes_with_different_data_are_refused_on_each(files, start, tmp_path):
    directories = [tmp_path / "one", tmp_path / "other"]
    for folder, pairs in zip(directories, (UPPER[:16], UPPER[1:17]), strict=True):
        folder.mkdir()
        write_pairs(folder / "train.jsonl", pairs)
    arguments = training(files, tmp_path / "run", TRAIN_FILES="train.jsonl")
    started = start(*[arguments] * 2, directories=directories)
    assert started.codes() == [2, 2]
    for number in range(2):
        errors = started.errors(number)
        assert "process 1 of 2 has other examples than process 0" in errors
        assert "-digest of 16 of them" in errors


@pytest.mark.exhaustive
@pytest.mark.parametrize("lacking", sample(1, [0, 1]))
def test_an_error_in_one_process_stops_the_others(lacking, files, start, tmp_path):
    directories = [tmp_path / "0", tmp_path / "1"]
    for folder in directories:
        folder.mkdir()
    write_pairs(directories[1 - lacking] / "train.jsonl", UPPER[:16])
    arguments = training(files, tmp_path / "run", TRAIN_FILES="train.jsonl")
    started = start(*[arguments] * 2, directories=directories)
    codes = started.codes()
    assert (codes[lacking], codes[1 - lacking]) == (2, 3)
    assert "train.jsonl" in started.errors(lacking)
    last = started.last_said(1 - lacking)
    assert f"process {lacking} of 2 stopped with exit code 2" in last


def test_several_processes_need_a_mesh(files, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(processes, "count", lambda: 2)
    assert main(training(files, tmp_path / "run")[:-1]) == 2
    assert "2 processes were started, but Run.mesh is None" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"process": 0}, "--coordinator and --processes must be given with the others"),
        ({"coordinator": "host", "processes": 2, "process": 0}, "is 'host', expected "),
        ({"coordinator": "host:1", "processes": 2, "process": 2}, "is 2 of --proce"),
        ({"silence": 0.5}, "--silence is 0.5, expected a number from 1"),
    ],
)
def test_invalid_launches_are_refused(given, message):
    with pytest.raises(InputError, match=message):
        Launch(**given)


def test_distributed_and_process_are_mutually_exclusive(capsys):
    given = ["--distributed", "--process", "1"]
    assert main(["generate", "--run", "none", "text", *given]) == 2
    assert "--distributed detects what" in capsys.readouterr().err


def last_report(written: bytes, number: int) -> str:
    """The report about one of two processes when no coordinator listens."""
    address = f"127.0.0.1:{several_processes.free_port()}"
    done = subprocess.run(
        [sys.executable, crash_reporter.__file__, str(number), "2", address, "go on"],
        input=written,
        capture_output=True,
        check=True,
    )
    return done.stderr.decode()


@pytest.mark.exhaustive
def test_a_process_reports_its_end_unless_the_report_is_withdrawn():
    assert (
        last_report(crash_reporter.DONE, 0) == last_report(crash_reporter.DONE, 1) == ""
    )
    assert "process 0 of 2 was killed; go on" in last_report(b"", 0)
    assert "process 0 of 2 has died or cannot be reached" in last_report(b"", 1)


class Store(dict):
    """Replaces JAX's store; it contains the words of the other processes."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool) -> None:
        assert allow_overwrite
        self[key] = value

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        return [(k, x) for k, x in self.items() if k.startswith(key)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("1", "process 2 of 3 has not been heard from"),
        (DONE, None),
        (f"{STOPPED} with exit code 2", "process 2 of 3 stopped with exit code 2"),
    ],
)
def test_a_silent_process_is_detected(word, expected, monkeypatch):
    monkeypatch.setattr("prompt_tuning.processes.heartbeat.GRACE", 0.1)
    store, reports = Store(), []
    watcher = HeartbeatMonitor(store, 0, 3, 0.5, reports.append)
    store["prompt_tuning/alive/2"] = word
    watcher.start()
    for beat in range(30):
        # Process 1 sends another heartbeat.
        store["prompt_tuning/alive/1"] = str(beat)
        time.sleep(0.05)
    watcher.leave(DONE)
    assert store["prompt_tuning/alive/0"] == DONE
    assert bool(reports) == (expected is not None)
    assert all(report.startswith(expected) for report in reports)
