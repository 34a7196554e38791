"""A run with quantized weights, from the command line."""

import dataclasses
import shutil

import numpy as np
import pytest

from prompt_tuning.checkpoints.run_store.checkpoint_names import FOLDER
from prompt_tuning.cli.main import main
from tests.support.exhaustive import sample
from tests.support.quantized_folders import write_quantized
from tests.support.small_runs import (
    DECODER,
    logged,
    trained_prompt,
    tune,
    write_model,
)
from tests.support.staged_runs import staged

INT8 = {"Pretrained__parameter_dtype": "int8"}
WIDER = dataclasses.replace(DECODER, width=64, head_width=32, feed_forward_width=96)
QUANTIZED_TABLES = {
    "Pretrained__parameter_dtype": "nf4",
    "Pretrained__quantization_group": 16,
    "Pretrained__quantized_tables": True,
    "Run__steps": 2,
    "Run__accumulate": 2,
    "Run__evaluation": None,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "store"),
    sample(
        1, [("decoder", "nf4"), ("t5", "int8"), ("t5", "int4"), ("decoder", "int8")]
    ),
)
def test_a_quantized_run_resumes_and_is_read_again(
    files, family, store, tmp_path, capsys
):
    model, choice = getattr(files, family), {"Pretrained__parameter_dtype": store}
    assert tune(files, tmp_path, model, **choice) == 0
    assert f"  {store} " in capsys.readouterr().out
    finished = trained_prompt(tmp_path, 6)
    assert finished != trained_prompt(tmp_path, 3)
    shutil.rmtree(tmp_path / FOLDER / "checkpoint_6")
    assert tune(files, tmp_path, model, **choice) == 0
    assert "resuming from step 3" in capsys.readouterr().out
    assert trained_prompt(tmp_path, 6) == finished
    assert main(["evaluate", "--run", str(tmp_path)]) == 0
    assert main(["generate", "--run", str(tmp_path), "abc=", "--new_tokens=2"]) == 0
    capsys.readouterr()
    wide = "--gin.Pretrained.parameter_dtype='float32'"
    assert main(["evaluate", "--run", str(tmp_path), wide]) == 2
    assert "another frozen_model" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_runs_with_quantized_tables_have_the_losses_of_one_device(
    files, tmp_path, monkeypatch
):
    config = dataclasses.replace(WIDER, layers=2)
    for tied in (True, False):
        model = write_model(
            tmp_path / f"{tied}", dataclasses.replace(config, tied_head=tied)
        )
        places = {
            "one": [],
            "tensor": mesh(tensor=2),
            "fsdp": mesh(fsdp=2),
            "streamed": ["--gin.Pretrained.weights='streamed'"],
            "staged": staged(monkeypatch, 2),
        }
        losses = {}
        for place, more in places.items():
            out = tmp_path / f"{tied}-{place}"
            arguments = files.arguments(out, model, **QUANTIZED_TABLES)
            assert main(["train", "--no_report", *arguments, *more]) == 0
            losses[place] = [each["loss"] for each in logged(out) if "loss" in each]
        for place in places:
            np.testing.assert_allclose(losses[place], losses["one"], rtol=1e-5)


def mesh(**sizes: int) -> list[str]:
    given = [f"--gin.MeshShape.{name}={size}" for name, size in sizes.items()]
    return ["--gin.Run.mesh=@MeshShape()", "--gin.MeshShape.data=1", *given]


def test_training_the_weights_of_a_quantized_model_is_refused(files, tmp_path, capsys):
    choices = {"ParameterGroup__regexes": [".*/kernel"], **INT8}
    assert tune(files, tmp_path, **choices) == 2
    assert "would train 7 quantized parameters" in capsys.readouterr().err


@pytest.fixture
def published(tmp_path):
    base = write_model(tmp_path / "base", WIDER)
    return write_quantized(base, tmp_path / "model", "gptq")


@pytest.mark.slow
def test_a_run_on_a_quantized_folder_holds_it_as_published(
    files, published, tmp_path, capsys
):
    arguments = ["--model", str(published), "--train", str(files.train), "--steps", "1"]
    assert main(["train", *arguments, "--out", str(tmp_path / "run")]) == 0
    held = "as published: int4 in groups of 32 with zero points"
    assert held in capsys.readouterr().out
    run = ["--run", str(tmp_path / "run")]
    assert main(["generate", *run, "abc=", "--new_tokens=2"]) == 0


@pytest.mark.exhaustive
def test_memory_names_the_store_of_a_quantized_folder(files, published, capsys):
    arguments = ["--model", str(published), "--train", str(files.train)]
    assert main(["memory", *arguments, "--policy", "none"]) == 0
    table = capsys.readouterr().out
    assert "7 stacks of kernels as published, in int4 in groups of 32" in table
    assert "instead of the folder's own types" in table
