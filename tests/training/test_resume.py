"""A killed, stopped or damaged run ends with the bits of an uninterrupted one."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from prompt_tuning.adapters.prompt_files import read_prompt
from prompt_tuning.checkpoints.run_store.checkpoint_names import FOLDER, steps_in
from prompt_tuning.cli.main import split_bindings
from prompt_tuning.config.gin_files import read_run
from prompt_tuning.core.interrupts import INTERRUPTED
from prompt_tuning.training import loop
from prompt_tuning.training.opening import open_run
from prompt_tuning.training.progress import LineReporter
from prompt_tuning.training.step import CompiledStep
from tests.support.exhaustive import sample
from tests.support.small_runs import (
    COMPILATION_CACHE,
    Killed,
    kill_at_call,
    logged,
    trained_prompt,
    tune,
)

STEPS = 40
CHOICES: dict[str, Any] = {
    "Run.steps": STEPS,
    "Run.save_every": 5,
    "Run.evaluate_every": 10,
    "DataSource.buckets": 2,
}
IMPORT_MAIN = """
import sys
from prompt_tuning.cli.main import main
"""
SLOWLY = f"""
{IMPORT_MAIN}
import time
from prompt_tuning.training import loop

record = loop._Loop._record

def slowly(*arguments):
    time.sleep(0.05)
    record(*arguments)

loop._Loop._record = slowly
"""
DYING_IN_A_SAVE = """
import os, signal, sys
from pathlib import Path

calls = 0

def counted(function):
    def call(*arguments):
        global calls
        calls += 1
        if calls == {call}:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)
    return call

os.fsync, Path.rename = counted(os.fsync), counted(Path.rename)
"""


@pytest.fixture(scope="module")
def uninterrupted(files, tmp_path_factory) -> Path:
    """The same run without a stop."""
    directory = tmp_path_factory.mktemp("unkilled") / "run"
    assert tune(files, directory, **CHOICES) == 0
    return directory


@pytest.fixture
def train(files, tmp_path) -> Callable[..., int]:
    """Runs the command in this process; calls may add options."""

    def run(**choices) -> int:
        return tune(files, tmp_path / "run", **(CHOICES | choices))

    return run


@pytest.fixture(scope="module")
def prepared(files) -> Callable[[Path], None]:
    """The same run, compiled once for all directories."""
    arguments = files.arguments(Path("elsewhere"), **CHOICES)
    plain, bindings = split_bindings(arguments)
    trainer = open_run(read_run([plain[0].partition("=")[2]], bindings))

    def run(directory: Path) -> None:
        loop.train(
            dataclasses.replace(
                trainer,
                run=dataclasses.replace(trainer.run, directory=str(directory)),
                start=jax.tree.map(jnp.copy, trainer.start),
            ),
            make_reporter=lambda done: LineReporter(Console(quiet=True), STEPS),
        )

    return run


@pytest.fixture
def start(files, tmp_path):
    """Starts the command in a separate process, after some lines of Python."""
    processes = []

    def run(first: str) -> subprocess.Popen:
        arguments = ["train", *files.arguments(tmp_path / "run", **CHOICES)]
        code = f"{first}\n{IMPORT_MAIN}\nsys.exit(main({arguments!r}))"
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | COMPILATION_CACHE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def wait_for(ready: Callable[[], bool], process: subprocess.Popen) -> None:
    for _ in range(12_000):  # it ends much sooner, unless the machine is very busy
        if ready():
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    raise TimeoutError("the run did not come so far within ten minutes")


def lines_in(directory: Path) -> int:
    file = directory / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def check_same(directory: Path, uninterrupted: Path) -> None:
    """Checks that prompt, optimizer state, log and checkpoints equal another run's."""
    checkpoints = sorted(path.name for path in (directory / FOLDER).iterdir())
    assert checkpoints == sorted(
        path.name for path in (uninterrupted / FOLDER).iterdir()
    )
    for name in checkpoints:
        for file in ("decoder.prompt.prompt.npy", "optimizer.npz"):
            content = (directory / FOLDER / name / file).read_bytes()
            assert content == (uninterrupted / FOLDER / name / file).read_bytes()
    assert timeless(directory) == timeless(uninterrupted)


def timeless(directory: Path) -> list[dict]:
    """Returns the log without times and without records of starts."""
    lines = logged(directory)
    for line in lines:
        line.pop("tokens_per_second", None)
        line.pop("data_wait_share", None)
    return lines


@pytest.mark.exhaustive
def test_a_kill_during_a_step(start, train, tmp_path, uninterrupted):
    process = start(SLOWLY)
    wait_for(lambda: lines_in(tmp_path / "run") >= 17, process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert lines_in(tmp_path / "run") < STEPS
    assert train() == 0
    check_same(tmp_path / "run", uninterrupted)


@pytest.mark.exhaustive
def test_a_kill_during_a_save(start, train, tmp_path, uninterrupted):
    # Fourteen calls claim the directory and save once, seven more save again. This call
    # writes the third file after the log of the third save.
    process = start(DYING_IN_A_SAVE.format(call=25))
    printed, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, printed
    assert any(".tmp" in path.name for path in (tmp_path / "run" / FOLDER).iterdir())
    assert train() == 0
    check_same(tmp_path / "run", uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("step", sample(2, [1, 5, 6, 10, 33, STEPS]))
def test_interruption_at_a_step(step, prepared, tmp_path, uninterrupted, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(Killed):
        fail_at(patched, step)
        prepared(tmp_path / "run")
    prepared(tmp_path / "run")
    check_same(tmp_path / "run", uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("call", sample(3, [*range(1, 11), *range(11, 31, 2)]))
def test_interruption_at_each_disk_call(
    call, prepared, tmp_path, uninterrupted, monkeypatch
):
    """Covers the calls of the first three saves and of the first deletion."""
    with monkeypatch.context() as patched, pytest.raises(Killed):
        kill_at_call(patched, call)
        prepared(tmp_path / "run")
    prepared(tmp_path / "run")
    check_same(tmp_path / "run", uninterrupted)


@pytest.mark.slow
def test_sigterm_saves_and_the_same_command_resumes(
    start, train, tmp_path, uninterrupted
):
    process = start(SLOWLY)
    wait_for(lambda: lines_in(tmp_path / "run") >= 12, process)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate()
    assert process.returncode == 0, printed
    stopped = max(steps_in(tmp_path / "run" / FOLDER))
    assert f"stopped at step {stopped} of {STEPS}" in printed
    assert stopped % 5 and 12 <= stopped < STEPS
    assert train() == 0
    # The checkpoint of the stop is no longer among the newest two.
    check_same(tmp_path / "run", uninterrupted)


@pytest.mark.slow
def test_ctrl_c_saves_and_ends_with_its_exit_code(train, tmp_path, monkeypatch):
    """Otherwise a shell would go on to the next command of `train && evaluate`."""

    def interrupt_twice(self, step, logged):
        if step == 6:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(LineReporter, "advance", interrupt_twice)
    assert train() == INTERRUPTED
    assert 6 < steps_in(tmp_path / "run" / FOLDER)[-1] < 10


@pytest.mark.exhaustive
def test_a_stop_at_an_evaluation_step_evaluates(
    train, tmp_path, uninterrupted, monkeypatch
):
    """Otherwise the best checkpoint would differ from that of an uninterrupted run."""

    def stop(self, step, logged):
        if step == 10:
            signal.raise_signal(signal.SIGTERM)

    # Step 10 is recorded after the signal's flag is read, so the test waits for 9.
    monkeypatch.setattr(
        "prompt_tuning.training.progress.LineReporter.advance",
        lambda self, step, logged: stop(self, step + 1, logged),
    )
    assert train() == 0
    assert steps_in(tmp_path / "run" / FOLDER)[-1] == 10
    monkeypatch.undo()
    assert train() == 0
    check_same(tmp_path / "run", uninterrupted)


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_skipped(
    train, tmp_path, uninterrupted, capsys, monkeypatch
):
    fail_at(monkeypatch, 27)
    with pytest.raises(Killed):
        train()
    monkeypatch.undo()
    newest = tmp_path / "run" / FOLDER / "checkpoint_25"
    prompt = newest / "decoder.prompt.prompt.npy"
    prompt.write_bytes(prompt.read_bytes()[:-1])
    assert train() == 0
    printed = capsys.readouterr().out
    assert f"{prompt} is damaged" in printed and "checkpoint_25 is skipped" in printed
    assert "resuming from step 20" in printed
    check_same(tmp_path / "run", uninterrupted)


@pytest.mark.slow
def test_a_run_without_a_whole_checkpoint_is_refused(train, tmp_path, capsys):
    assert train(**{"Run.steps": 5, "Run.evaluate_every": 0}) == 0
    state = tmp_path / "run" / FOLDER / "checkpoint_5" / "state.json"
    state.write_text(state.read_text()[:-20])
    before = snapshot(tmp_path / "run")
    assert train(**{"Run.steps": 5, "Run.evaluate_every": 0}) == 2
    assert "are damaged (steps [5])" in capsys.readouterr().err
    assert snapshot(tmp_path / "run") == before


def test_the_newest_and_the_best_checkpoints_are_kept(uninterrupted):
    steps = steps_in(uninterrupted / FOLDER)
    losses = {
        line["step"]: line["evaluation/loss"]
        for line in logged(uninterrupted)
        if "evaluation/loss" in line
    }
    assert losses.keys() == {10, 20, 30, 40}
    best = min(losses, key=losses.__getitem__)
    assert steps == sorted({35, 40, best})


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_the_run_with_the_last_good_prompt(
    train, tmp_path, uninterrupted, capsys, monkeypatch
):
    run_step = CompiledStep.__call__

    def broken(self, state, frozen, batch):
        number = int(state.step) + 1
        following, metrics = run_step(self, state, frozen, batch)
        return following, metrics | ({"loss": np.nan} if number == 18 else {})

    monkeypatch.setattr(CompiledStep, "__call__", broken)
    assert train() == 1
    message = capsys.readouterr().err
    assert "the loss of step 18 is nan" in message
    assert "the checkpoint of step 15 is kept as the last good one" in message
    assert steps_in(tmp_path / "run" / FOLDER) == [10, 15]
    assert [line["step"] for line in logged(tmp_path / "run")][-1] == 17
    monkeypatch.undo()
    assert train() == 0
    check_same(tmp_path / "run", uninterrupted)


@pytest.mark.slow
def test_a_prompt_that_overflows_is_not_saved(train, tmp_path, capsys):
    assert train(**{"adafactor.learning_rate": 1e38, "Run.save_every": 1}) == 1
    message = capsys.readouterr().err
    assert "is inf; the checkpoint of step" in message
    assert np.isfinite(read_prompt(tmp_path / "run")).all()


def test_a_finished_run_takes_no_further_steps(uninterrupted, files, capsys):
    before = trained_prompt(uninterrupted, STEPS)
    assert tune(files, uninterrupted, **CHOICES) == 0
    assert f"all {STEPS} steps are already done" in capsys.readouterr().out
    assert trained_prompt(uninterrupted, STEPS) == before


def fail_at(monkeypatch, step: int) -> None:
    record = loop._Loop._record

    def recorded(self, at, *arguments):
        if at == step:
            raise Killed
        record(self, at, *arguments)

    monkeypatch.setattr(loop._Loop, "_record", recorded)


def snapshot(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
