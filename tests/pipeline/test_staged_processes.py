"""Stages in several processes: the curve of one device, and a killed process."""

import dataclasses
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from prompt_tuning.checkpoints.run_store.checkpoint_names import FOLDER, steps_in
from prompt_tuning.processes.heartbeat import ANOTHER_STOPPED
from tests.support import several_processes
from tests.support.small_runs import DECODER, logged, write_model

STAGES = ["--gin.Run.mesh=@MeshShape()", "--gin.MeshShape.stage=4"]
FULL = ["--gin.ParameterGroup.regexes=['.*']", "--gin.Run.prompt=None"]
# Adafactor divides small gradients by their size, and so enlarges rounding errors.
MOMENTUM = [
    "--gin.ParameterGroup.optimizer=@optax_transformation()",
    "--gin.optax_transformation.name='sgd'",
    "--gin.optax_transformation.learning_rate=0.03",
    "--gin.optax_transformation.arguments={'momentum': 0.9}",
]
SHORT = {"Run__accumulate": 2, "Run__evaluation": None}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Returns a model with a block for each of four stages."""
    folder = tmp_path_factory.mktemp("model")
    return write_model(folder / "decoder", dataclasses.replace(DECODER, layers=4))


def losses(directory):
    return [line["loss"] for line in logged(directory) if "loss" in line]


def parameters(directory: Path, step: int) -> dict[str, np.ndarray]:
    """Returns the trained parameters of a checkpoint."""
    files = (directory / FOLDER / f"checkpoint_{step}").glob("*.npy")
    return {file.name: np.load(file) for file in files}


@pytest.mark.exhaustive
def test_two_processes_have_the_curve_of_one_device(files, model, tmp_path):
    method, curves = [*FULL, "--gin.Run.checkpoint_form='orbax'"], {}
    for name, count, more in (("one", 1, []), ("two", 2, STAGES)):
        directory = tmp_path / name / "run"
        arguments = files.arguments(directory, model, Run__steps=3, **SHORT)
        command = ["train", *arguments, *method, *more]
        started = several_processes.start(
            tmp_path / name / "output", [command] * count, devices=count
        )
        try:
            started.succeeded()
        finally:
            started.end()
        curves[name] = losses(directory)
    assert len(curves["two"]) == 3
    np.testing.assert_allclose(curves["two"], curves["one"], rtol=1e-5)


@pytest.mark.exhaustive
def test_a_process_that_is_ahead_still_serves_its_arrays(files, model, tmp_path):
    """The threads of its two devices must not all wait in the end of the step."""
    arguments = files.arguments(tmp_path / "run", model, **SHORT | {"Run__steps": 3})
    started = several_processes.start(
        tmp_path / "output",
        [["train", *arguments, *STAGES]] * 2,
        devices=2,
        module="tests.support.slow_fetches",
    )
    try:
        started.succeeded()
    finally:
        started.end()


@pytest.mark.exhaustive
@pytest.mark.parametrize("killed", [0, 1])
def test_the_other_process_ends_if_one_is_killed(files, model, tmp_path, killed):
    directory = tmp_path / "run"
    choices = SHORT | {"Run__steps": 100_000, "Run__save_every": 100_000}
    command = ["train", *files.arguments(directory, model, **choices), *STAGES]
    started = several_processes.start(tmp_path / "output", [command] * 2, devices=2)
    try:
        started.wait_for(lambda: "step 3/" in started.printed(0))
        started.processes[killed].send_signal(signal.SIGKILL)
        begun = time.monotonic()
        codes = started.codes()
        assert time.monotonic() - begun < 60
    finally:
        started.end()
    # The runtime of JAX itself ends a process that has lost process 0.
    assert codes[1 - killed] == ANOTHER_STOPPED if killed else codes[1] != 0
    message = started.last_said(1 - killed)
    assert f"process {killed} of 2" in message
    assert "the same command continues from its last checkpoint" in message


@pytest.mark.exhaustive
def test_processes_of_one_stage_each_continue_after_a_kill(files, model, tmp_path):
    """Ends with the bits of processes that nothing killed, then without stages."""
    choices = SHORT | {"Run__steps": 60, "Run__save_every": 10}
    stages = [STAGES[0], "--gin.MeshShape.stage=2", "--gin.MeshShape.data=1"]

    def start(
        directory: Path, count: int, more: Sequence[str] = (), **further
    ) -> several_processes.Started:
        arguments = files.arguments(directory, model, **(choices | further))
        output = directory.with_name(f"{directory.name} {len(started)}")
        command = ["train", *arguments, *MOMENTUM, *more]
        started.append(several_processes.start(output, [command] * count, devices=1))
        return started[-1]

    started: list[several_processes.Started] = []
    one, whole, killed = (tmp_path / name for name in ("one", "whole", "killed"))
    try:
        start(one, 1, Run__steps=62).succeeded()
        start(whole, 2, stages).succeeded()
        dying = start(killed, 2, stages)
        dying.wait_for(lambda: 10 in steps_in(killed / FOLDER))
        dying.processes[1].send_signal(signal.SIGKILL)
        assert dying.codes()[0] != 0
        assert steps_in(killed / FOLDER)[-1] < 60
        start(killed, 2, stages).succeeded()
        assert losses(killed) == losses(whole)
        np.testing.assert_equal(parameters(killed, 60), parameters(whole, 60))
        start(killed, 1, Run__steps=62).succeeded()
    finally:
        for processes in started:
            processes.end()
    np.testing.assert_allclose(losses(killed), losses(one), rtol=1e-6)
    (expected,) = parameters(one, 62).values()
    (actual,) = parameters(killed, 62).values()
    largest = np.abs(expected).max()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6 * largest)
