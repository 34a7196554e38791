"""Stages in several processes: the curve of one device, and a killed process."""

import dataclasses
import signal
import time

import numpy as np
import pytest

from prompt_tuning.processes.heartbeat import ANOTHER_STOPPED
from tests.support import several_processes
from tests.support.small_runs import DECODER, logged, write_model

STAGES = ["--gin.Run.mesh=@MeshShape()", "--gin.MeshShape.stage=4"]
FULL = ["--gin.ParameterGroup.regexes=['.*']", "--gin.Run.prompt=None"]
SHORT = {"Run__accumulate": 2, "Run__evaluation": None}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Returns a model with a block for each of four stages."""
    folder = tmp_path_factory.mktemp("model")
    return write_model(folder / "decoder", dataclasses.replace(DECODER, layers=4))


def losses(directory):
    return [line["loss"] for line in logged(directory) if "loss" in line]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "method", [[], [*FULL, "--gin.Run.checkpoint_form='orbax'"]], ids=["prompt", "all"]
)
def test_two_processes_have_the_curve_of_one_device(files, model, tmp_path, method):
    curves = {}
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
