"""Pipelines that cannot run: one message, before anything is compiled or written."""

import dataclasses

import jax
import pytest

from prompt_tuning.cli.main import main
from tests.support.small_runs import DECODER, write_model

TWO = ["MeshShape.stage=2"]
EXPECTED = "expected one of 'auto', 'none', 'gpipe', '1f1b', '1f1b-2', 'zb-h1'"
NOTHING = [
    "Pretrained.rematerialization=@Rematerialization()",
    "Rematerialization.policy='nothing'",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of two blocks."""
    config = dataclasses.replace(DECODER, layers=2)
    return write_model(tmp_path_factory.mktemp("model") / "decoder", config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["MeshShape.stage=4"], "MeshShape.stage is 4, but the model has 2 blocks"),
        (["MeshShape.stage=3"], "cannot be arranged as stage 3 x data -1 x fsdp 1"),
        (
            [*TWO, "MeshShape.data=3"],
            "stage 2 x data 3 x fsdp 1 x tensor 1 takes 6 devices, but there are 4",
        ),
        (["Pipeline.schedule='1f1b'"], "but the mesh has one stage"),
        ([*TWO, "Pipeline.schedule='zb-h2'"], EXPECTED),
        ([*TWO, "Pipeline.layers=[2]"], "blocks of 1 stages, but the mesh has 2"),
        ([*TWO, "Pipeline.layers=[1, 2]"], "together 3 blocks, but the model has 2"),
        (
            [*TWO, "Pipeline.layers=[2, 0]"],
            "a number of Pipeline.layers is 0, exp",
        ),
        ([*TWO, "Pipeline.microbatches=3"], "not a multiple of Run.accumulate, 2"),
        (
            [*TWO, "MeshShape.data=2", "Pipeline.microbatches=6"],
            "a step has 16 rows, which cannot be divided among 6 micro-batches",
        ),
        (
            [*TWO, "Pipeline.microbatches=16"],
            "a micro-batch has 1 rows, which cannot be divided among the 2 devices",
        ),
        (
            [*TWO, "Pipeline.schedule='1f1b-2'"],
            "2 stages needs at least 4 micro-batches, but there are 2",
        ),
        (
            [*TWO, "Pipeline.schedule='zb-h1'", "Pipeline.two_stage=False"],
            "whose backward pass has two parts, but Pipeline.two_stage is False",
        ),
        (
            [*TWO, "Pipeline.joined_p2=True", "Pipeline.two_stage=False"],
            "Pipeline.joined_p2 is True with schedule 'auto' and two_stage False",
        ),
        (
            [*TWO, "Pipeline.microbatches=4", "Run.objective=@Contrastive()"],
            "a query of a Contrastive would be compared with the texts of its micro-",
        ),
        ([*TWO, "Pretrained.weights='streamed'"], "the stages of a pipeline hold"),
        ([*TWO, "Pretrained.weights='pinned_host'"], "the stages of a pipeline hold"),
        (
            [*TWO, *NOTHING, "Rematerialization.every=2"],
            "wraps every 2 and has 0 ranges, but in a pipeline all blocks of a stack",
        ),
    ],
)
def test_a_pipeline_that_cannot_run_is_refused(
    files, model, tmp_path, monkeypatch, capsys, settings, message
):
    devices = jax.devices()[:4]
    monkeypatch.setattr(jax, "devices", lambda *arguments: devices)
    choices = {"Run.accumulate": 2, "Run.evaluation": None}
    arguments = files.arguments(tmp_path / "run", model, **choices)
    bindings = ["Run.mesh=@MeshShape()", *settings]
    if any(setting.startswith("Pipeline.") for setting in settings):
        bindings.append("Run.pipeline=@Pipeline()")
    assert main(["train", *arguments, *(f"--gin.{x}" for x in bindings)]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1
    assert "compiling" not in printed.out
    assert not (tmp_path / "run").exists()
