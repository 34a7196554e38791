"""Weights in pinned host memory on a mesh: each device copies its own shard."""

import dataclasses

import numpy as np
import pytest

from prompt_tuning.cli.main import main
from prompt_tuning.config import gin_files
from prompt_tuning.training.opening import open_run
from tests.support.small_runs import DECODER, logged, write_model

FSDP = ("--gin.Run.mesh=@MeshShape()", "--gin.MeshShape.data=-1")
FSDP += ("--gin.MeshShape.fsdp=2", "--gin.Run.steps=3")
PINNED = "--gin.Pretrained.weights='pinned_host'"


@pytest.mark.exhaustive
def test_each_device_has_half_of_the_blocks_in_host_memory(files, tmp_path):
    model = write_model(tmp_path / "model", dataclasses.replace(DECODER, layers=2))
    logs = []
    for name, more in (("device", ()), ("pinned", (PINNED,))):
        given = files.arguments(tmp_path / name, model)
        assert main(["train", *given, *FSDP, *more]) == 0
        logs.append(logged(tmp_path / name))
    for actual, expected in zip(*logs, strict=True):
        for metric in {"loss", "evaluation/loss"} & expected.keys():
            np.testing.assert_allclose(actual[metric], expected[metric], rtol=1e-6)
    run = gin_files.read_run(
        ["runs/first_prompt.gin"],
        [
            option.removeprefix("--gin.").replace("=", " = ", 1)
            for option in (*files.arguments(tmp_path / "new", model)[1:], *FSDP, PINNED)
        ],
    )
    blocks = {p: x for p, x in open_run(run).frozen.items() if "/layers/" in p}
    assert all(x.sharding.memory_kind == "pinned_host" for x in blocks.values())
    first = [x.addressable_shards[0].data.nbytes for x in blocks.values()]
    # Only the norms' scales are whole on each device.
    assert sum(first) <= 0.55 * sum(x.nbytes for x in blocks.values())
