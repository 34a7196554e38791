"""Runs in stages: the curve of one device, and resuming with other stages."""

import dataclasses
import gzip
import json
from collections import Counter

import numpy as np
import pytest

from prompt_tuning.cli.main import main
from tests.support.small_runs import DECODER, T5, logged, write_model
from tests.support.staged_runs import staged

FULL = [
    "--gin.ParameterGroup.regexes=['.*']",
    "--gin.Run.prompt=None",
    "--gin.Run.checkpoint_form='orbax'",
]
SHORT = {"Run__accumulate": 2, "Run__evaluation": None, "Run__save_every": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of models with several blocks in each stack."""
    folder = tmp_path_factory.mktemp("models")
    decoder = dataclasses.replace(DECODER, layers=2)
    t5 = dataclasses.replace(T5, layers=2, encoder_layers=2)
    return {
        "decoder": write_model(folder / "decoder", decoder),
        "t5": write_model(folder / "t5", t5),
    }


def losses(directory):
    return [entry["loss"] for entry in logged(directory) if "loss" in entry]


def tune(files, directory, model, steps, more=()):
    """Runs the command; returns its exit code."""
    arguments = files.arguments(directory, model, Run__steps=steps, **SHORT)
    return main(["train", *arguments, *more])


@pytest.mark.exhaustive
def test_an_encoder_decoder_resumes_with_other_stages(
    files, models, tmp_path, monkeypatch
):
    model, directory = models["t5"], tmp_path / "staged"
    assert tune(files, tmp_path / "one", model, 4) == 0
    for stages, steps in ((2, 2), (4, 4)):
        with monkeypatch.context() as patched:
            more = staged(patched, stages)
            assert tune(files, directory, model, steps, more) == 0
    assert len(losses(directory)) == 4
    np.testing.assert_allclose(losses(directory), losses(tmp_path / "one"), rtol=1e-5)


@pytest.mark.slow
def test_operations_of_each_stage_are_traced(files, models, tmp_path, monkeypatch):
    more = [*staged(monkeypatch, 2), "--profile", str(tmp_path / "trace")]
    one_part = [f"--gin.Pipeline.{x}" for x in ("schedule='gpipe'", "two_stage=False")]
    more += ["--gin.Run.pipeline=@Pipeline()", *one_part]
    assert tune(files, tmp_path / "run", models["decoder"], 5, more) == 0
    (file,) = (tmp_path / "trace").rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    # Three steps of two micro-batches.
    for name in ("forward", "backward"):
        operations = [event["args"] for event in events if event.get("name") == name]
        assert Counter((each["stage"], each["index"]) for each in operations) == {
            (stage, index): 3 for stage in "01" for index in "01"
        }


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "method", "stages", "inner", "settings"),
    [
        ("decoder", FULL, 2, {"data": 2, "tensor": 2}, ["schedule='gpipe'"]),
        ("decoder", [], 2, {"fsdp": 2}, ["microbatches=4"]),
        ("t5", FULL, 2, {"data": 2}, ["virtual=2", "microbatches=4"]),
        ("t5", FULL, 2, {}, ["layers=[3, 1]", "schedule='1f1b-2'", "microbatches=4"]),
    ],
)
def test_stages_have_the_curve_of_one_device(
    files, models, tmp_path, monkeypatch, family, method, stages, inner, settings
):
    model = models[family]
    assert tune(files, tmp_path / "one", model, 4, method) == 0
    more = [*method, *staged(monkeypatch, stages, **inner)]
    if settings:
        more += ["--gin.Run.pipeline=@Pipeline()"]
        more += [f"--gin.Pipeline.{setting}" for setting in settings]
    assert tune(files, tmp_path / "staged", model, 4, more) == 0
    np.testing.assert_allclose(
        losses(tmp_path / "staged"), losses(tmp_path / "one"), rtol=1e-5
    )
