"""Several processes write one checkpoint, each its own shards."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from prompt_tuning.checkpoints.run_store import checkpoint_files
from prompt_tuning.checkpoints.run_store.checkpoint_names import FOLDER
from tests.support import several_processes
from tests.support.small_runs import logged

FULL = [
    "--gin.ParameterGroup.regexes=['.*']",
    "--gin.ParameterGroup.optimizer=@adamw()",
    "--gin.adamw.learning_rate=0.003",
    "--gin.Run.prompt=None",
    "--gin.Run.mesh=@MeshShape()",
    "--gin.MeshShape.data=1",
    "--gin.MeshShape.fsdp=-1",
]


@pytest.mark.exhaustive
def test_one_process_resumes_from_a_checkpoint_of_two(files, tmp_path):
    directory = tmp_path / "run"
    choices = {"Run__checkpoint_form": "orbax", "Run__steps": 4, "Run__save_every": 2}
    command = ["train", *files.arguments(directory, **choices), *FULL]
    run(tmp_path / "two", [command] * 2)
    checkpoints = [directory / FOLDER / f"checkpoint_{step}" for step in (2, 4)]
    parts = [checkpoints[0] / "arrays" / f"ocdbt.process_{number}" for number in (0, 1)]
    sizes = [sum(x.stat().st_size for x in part.rglob("d/*")) for part in parts]
    # Each has half of the fully sharded parameters; Orbax's indices vary in size.
    assert 0.25 < sizes[0] / sum(sizes) < 0.75
    before, curve = read(checkpoints[1]), losses(directory)
    shutil.rmtree(checkpoints[1])
    run(tmp_path / "one", [command])
    for path, leaf in read(checkpoints[1]).items():
        np.testing.assert_allclose(leaf, before[path], atol=1e-5, err_msg=path)
    np.testing.assert_allclose(losses(directory), curve, rtol=1e-5)


def run(folder: Path, commands: list[list[str]]) -> None:
    started = several_processes.start(folder, commands, devices=1)
    try:
        started.succeeded()
    finally:
        started.end()


def losses(directory: Path) -> list[float]:
    return [line["loss"] for line in logged(directory) if "loss" in line]


def read(checkpoint: Path) -> dict[str, np.ndarray]:
    state = checkpoint_files.verify(checkpoint)
    return checkpoint_files.read_trained(checkpoint, state)
