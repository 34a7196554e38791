"""Processes whose checkpoints differ are refused."""

import shutil

import pytest
from safetensors.numpy import load_file, save_file

from tests.support import several_processes

CHANGED = "model.layers.0.mlp.up_proj.weight"
PATH = "decoder/layers/mlp/up/kernel"


@pytest.fixture
def working_directories(files, tmp_path):
    """A folder for each of two processes, whose models differ in one array."""
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        shutil.copytree(files.decoder, folder / "model")
    file = folders[1] / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors[CHANGED] = tensors[CHANGED] + 1
    save_file(tensors, file, metadata={"format": "pt"})
    return folders


@pytest.mark.exhaustive
def test_another_sharded_parameter_is_named_on_each_process(
    files, working_directories, tmp_path
):
    command = ["train", *files.arguments(tmp_path / "run", MODEL="model")]
    command += ["--gin.Run.mesh=@MeshShape()", "--gin.MeshShape.fsdp=2"]
    started = several_processes.start(
        tmp_path / "printed", [command] * 2, devices=1, directories=working_directories
    )
    try:
        assert started.codes() == [2, 2], started.errors(0)
    finally:
        started.end()
    for number in range(2):
        errors = started.errors(number)
        assert "process 1 of 2 has other weights in its checkpoint than" in errors
        named = [
            line for line in errors.splitlines() if line.startswith(("  -", "  +"))
        ]
        assert [line.strip("-+ ").partition(":")[0] for line in named] == [PATH, PATH]
    assert not (tmp_path / "run").exists()
