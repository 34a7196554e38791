"""Killed and resumed runs in stages: the same bits, and the values of one device."""

import dataclasses
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from prompt_tuning.checkpoints.run_store.checkpoint_names import FOLDER, steps_in
from prompt_tuning.cli.main import main
from prompt_tuning.pipeline.stage_worker import StageWorker
from tests.support.exhaustive import sample
from tests.support.small_runs import (
    COMPILATION_CACHE,
    DECODER,
    Killed,
    logged,
    write_model,
)
from tests.support.staged_runs import staged

STEPS = 6
CHOICES = {
    "Run__steps": STEPS,
    "Run__save_every": 2,
    "Run__accumulate": 2,
    "Run__evaluation": None,
}
FULL = ["--gin.ParameterGroup.regexes=['.*']", "--gin.Run.prompt=None"]
# Adafactor divides small gradients by their size, and so enlarges rounding errors.
MOMENTUM = [
    "--gin.ParameterGroup.optimizer=@optax_transformation()",
    "--gin.optax_transformation.name='sgd'",
    "--gin.optax_transformation.learning_rate=0.3",
    "--gin.optax_transformation.arguments={'momentum': 0.9}",
]
TOKENS = ["--gin.DataSource.batch_tokens=250"]
STAGES = ["--gin.Run.mesh=@MeshShape()", "--gin.MeshShape.stage=2"]
DYING = """
import itertools, os, signal, sys
from prompt_tuning.checkpoints.run_store import checkpoint_files
from prompt_tuning.cli.main import main
from prompt_tuning.pipeline.stage_worker import StageWorker
from prompt_tuning.training import loop

calls = itertools.count(1)

def dying(function):
    def call(*arguments):
        if next(calls) == {call}:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)
    return call

{place} = dying({place})
sys.exit(main({arguments!r}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A model whose blocks and width can be divided among two, three or four stages."""
    config = dataclasses.replace(DECODER, layers=4, width=24)
    return write_model(tmp_path_factory.mktemp("model") / "decoder", config)


def arguments_of(files, directory, model, **choices) -> list[str]:
    return ["train", *files.arguments(directory, model, **(CHOICES | choices))]


def losses(directory) -> list[float]:
    return [line["loss"] for line in logged(directory) if "loss" in line]


def saved(directory: Path) -> dict[str, bytes]:
    """Returns the trained parameters and the optimizer's state of each checkpoint."""
    folder = directory / FOLDER
    files = [*folder.glob("*/*.npy"), *folder.glob("*/*.npz")]
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def assert_same_bits(directory: Path, undisturbed: Path) -> None:
    assert steps_in(directory / FOLDER)[-1] == STEPS
    assert saved(directory) == saved(undisturbed)
    assert losses(directory) == losses(undisturbed)


def assert_same_values(directory: Path, one: Path) -> None:
    """Compares losses and parameters with those of one device, to 1e-6."""
    assert len(losses(directory)) == STEPS
    np.testing.assert_allclose(losses(directory), losses(one), rtol=1e-6)
    files = list((one / FOLDER / f"checkpoint_{STEPS}").glob("*.npy"))
    assert files
    for file in files:
        expected = np.load(file)
        actual = np.load(directory / file.relative_to(one))
        largest = np.abs(expected).max()
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6 * largest)


@pytest.mark.slow
def test_an_interruption_within_a_step_keeps_the_bits(
    files, model, tmp_path, monkeypatch
):
    more = staged(monkeypatch, 2)
    whole, directory = tmp_path / "whole", tmp_path / "run"
    assert main([*arguments_of(files, whole, model), *more]) == 0
    command = [*arguments_of(files, directory, model), *more]
    calls, run = itertools.count(1), StageWorker.run

    def fail_late(*operation):
        if next(calls) == 57:
            raise Killed
        run(*operation)

    # A step has 12 operations: a prefix, two micro-batches, and back, on two stages.
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(StageWorker, "run", fail_late)
        main(command)
    assert 0 < steps_in(directory / FOLDER)[-1] < STEPS
    assert main(command) == 0
    assert_same_bits(directory, whole)


@pytest.fixture
def killed(files, model, tmp_path) -> Callable[..., None]:
    """Runs the command in a process that kills itself at a call of a function."""

    def run(directory: Path, place: str, call: int, method: Sequence[str]) -> None:
        command = [*arguments_of(files, directory, model), *method, *STAGES]
        code = DYING.format(place=place, call=call, arguments=command)
        environment = os.environ | COMPILATION_CACHE | {"JAX_NUM_CPU_DEVICES": "2"}
        process = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == -signal.SIGKILL, process.stdout + process.stderr

    return run


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", [[], FULL], ids=["prompt", "all"])
def test_a_killed_run_ends_with_the_same_bits(
    files, model, tmp_path, monkeypatch, killed, method
):
    more = [*method, *staged(monkeypatch, 2)]
    whole, directory = tmp_path / "whole", tmp_path / "run"
    assert main([*arguments_of(files, whole, model), *more]) == 0
    # Within the third step, after the next one, and within the next save.
    killed(directory, "StageWorker.run", 30, method)
    killed(directory, "loop._Loop._record", 2, method)
    killed(directory, "checkpoint_files.sync_file", 2, method)
    assert STEPS not in steps_in(directory / FOLDER)
    assert any(".tmp" in path.name for path in (directory / FOLDER).iterdir())
    assert main([*arguments_of(files, directory, model), *more]) == 0
    assert_same_bits(directory, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "method"),
    sample(1, [((2, 3, 1), []), ((1, 4, 2), TOKENS), ((2, 4, 1), FULL)]),
)
def test_other_stages_give_the_values_of_one_device(
    files, model, tmp_path, monkeypatch, stages, method
):
    one, directory = tmp_path / "one", tmp_path / "run"
    method = [*method, *MOMENTUM]
    assert main([*arguments_of(files, one, model), *method]) == 0
    for count, steps in zip(stages, (2, 4, STEPS), strict=True):
        command = [*arguments_of(files, directory, model, Run__steps=steps), *method]
        with monkeypatch.context() as patched:
            more = staged(patched, count) if count > 1 else []
            assert main([*command, *more]) == 0
    assert_same_values(directory, one)
