"""A sweep on a mesh of eight devices."""

import pytest

from prompt_tuning.cli.main import main
from tests.support.small_runs import logged

MESHES = [
    ("--gin.Run.mesh=None",),
    ("--gin.Run.mesh=@MeshShape()", "--gin.MeshShape.tensor=2"),
]
NAMES = ("loss", "accuracy", "evaluation/loss", "evaluation/accuracy")


@pytest.mark.exhaustive
def test_each_member_has_the_losses_of_one_device(files, tmp_path):
    """Prompts of two lengths, each with its own batches."""
    vary = ("--vary", "Run.seed,PROMPT_LENGTH=(0,4),(1,2)")
    results = []
    for number, mesh in enumerate(MESHES):
        directory = tmp_path / str(number)
        arguments = files.arguments(directory, Run__steps=3)
        assert main(["sweep", *arguments, *vary, *mesh]) == 0
        members = sorted(path for path in directory.iterdir() if path.is_dir())
        results.append([line for member in members for line in logged(member)])
    assert len(results[0]) == 2 * 4
    for one, eight in zip(*results, strict=True):
        measured = {name: one[name] for name in NAMES if name in one}
        assert measured
        assert {n: eight[n] for n in measured} == pytest.approx(measured, rel=1e-5)
