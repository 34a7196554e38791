"""A prompt sharded between two processes that starts from another run."""

from pathlib import Path

import numpy as np
import pytest

from prompt_tuning.adapters.prompt_files import read_prompt
from prompt_tuning.checkpoints.run_store.checkpoint_names import FOLDER
from prompt_tuning.cli.main import main
from tests.support import several_processes
from tests.support.small_runs import logged

SPLIT = [
    "--gin.Run.mesh=@MeshShape()",
    "--gin.MeshShape.fsdp=2",
    "--gin.MeshShape.rules=@AxisRules()",
    "--gin.AxisRules.rules=[('prompt_embed', 'fsdp')]",
]
ADAM = ["--gin.ParameterGroup.optimizer=@adamw()", "--gin.adamw.learning_rate=0.01"]


def arguments(files, directory: Path, **choices) -> list[str]:
    choices = {"Run__steps": 2} | choices
    return ["train", *files.arguments(directory, **choices), *ADAM]


@pytest.mark.exhaustive
def test_two_processes_resume_with_a_sharded_prompt(files, tmp_path):
    assert main(arguments(files, tmp_path / "first")) == 0
    choices = {"Run__start_from": str(tmp_path / "first")}
    choices |= {"Run__keep_optimizer_state": True}
    alone, together = tmp_path / "alone", tmp_path / "together"
    command = [*arguments(files, together, **choices), *SPLIT]
    started = several_processes.start(tmp_path / "printed", [command] * 2, devices=1)
    try:
        assert main(arguments(files, alone, **choices)) == 0
        started.succeeded()
    finally:
        started.end()
    one, two = (read_prompt(run / FOLDER / "checkpoint_2") for run in (alone, together))
    np.testing.assert_allclose(two, one, atol=1e-5)
    lines = [[x for x in logged(run) if "loss" in x] for run in (alone, together)]
    assert len(lines[0]) == 2
    for one, two in zip(*lines, strict=True):
        for name in ("loss", "prompt_norm", "gradient_norm"):
            np.testing.assert_allclose(two[name], one[name], rtol=1e-5)
