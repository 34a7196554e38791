"""`verify`, which makes a run again and compares the bits."""

import json
import shutil
from typing import Any

import optax
import pytest
from safetensors.numpy import load_file, save_file

from prompt_tuning.cli.main import main
from prompt_tuning.config.gin_files import read_run_directory
from prompt_tuning.training.fingerprint_log import (
    FINGERPRINTS_FILE,
    read_fingerprints,
)
from prompt_tuning.training.provenance import record_provenance
from tests.support.exhaustive import sample
from tests.support.small_runs import Killed, kill_at_call, tune


def verify(*arguments) -> int:
    return main(["verify", *map(str, arguments)])


@pytest.fixture(scope="module")
def recorded(files, tmp_path_factory):
    """A run with a copy of the model and data."""
    folder = tmp_path_factory.mktemp("recorded")
    shutil.copytree(files.decoder, folder / "model")
    shutil.copy(files.train, folder / "train.jsonl")
    train = str(folder / "train.jsonl")
    assert tune(files, folder / "run", folder / "model", TRAIN_FILES=train) == 0
    return folder


@pytest.fixture
def damaged(recorded, tmp_path):
    """The folder of the run, which is restored after the test."""
    backup = shutil.copytree(recorded, tmp_path / "backup")
    yield recorded
    shutil.rmtree(recorded)
    shutil.copytree(backup, recorded)


METHODS = sample(
    2,
    [
        ["--method", "lora", "--lora_dropout", "0.1"],
        ["--method", "prefix"],
        ["--method", "soft"],
        ["--method", "deep"],
        ["--method", "wayward"],
        ["--method", "ia3"],
        ["--method", "lora", "--dora"],
        ["--method", "mlp"],
        ["--method", "residual"],
        ["--method", "tokens", "--add_tokens", "<a>"],
    ],
)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_run_of_a_method_is_made_again(files, tmp_path, capsys, method):
    run = tmp_path / "run"
    options = ["--model", str(files.decoder), "--train", str(files.train)]
    short = ["--out", str(run), "--steps", "12", "--batch_size", "8"]
    assert main(["train", *options, *short, *method]) == 0
    assert verify(run) == 0
    assert "same bits after step 12 (3 fingerprints" in capsys.readouterr().out


@pytest.mark.slow
def test_a_resumed_run_is_made_again_in_one_piece(files, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        kill_at_call(patch, 14)
        with pytest.raises(Killed):
            tune(files, run)
    assert 0 < len(read_fingerprints(run)) < 7
    assert tune(files, run) == 0
    steps = [
        json.loads(line)["step"]
        for line in (run / FINGERPRINTS_FILE).read_text().splitlines()
    ]
    assert steps == [0, 1, 2, 3, 4, 5, 6]
    assert verify(run, "--steps", "4") == 0
    assert "after step 4 (5 fingerprints" in capsys.readouterr().out


@pytest.mark.slow
def test_another_optimizer_is_found_at_the_first_step_that_differs(
    recorded, monkeypatch, capsys
):
    apply: Any = optax.apply_updates
    traced = []

    def apply_updates(params, updates):
        traced.append(True)
        return {k: x * 1.0001 for k, x in apply(params, updates).items()}

    monkeypatch.setattr(optax, "apply_updates", apply_updates)
    assert verify(recorded / "run") == 1
    out = capsys.readouterr().out
    assert traced
    assert "after step 1 have other bits; they are the same after step 0" in out


def change_data(folder):
    file = folder / "train.jsonl"
    content = bytearray(file.read_bytes())
    content[content.index(b"=") - 1] ^= 1
    file.write_bytes(content)


def change_data_and_continue(folder):
    change_data(folder)
    record_provenance(read_run_directory(folder / "run"), 3, 1)


def change_config(folder):
    file = folder / "run" / "config.gin"
    file.write_text(file.read_text().replace("Run.seed = 0", "Run.seed = 1"))


def change_model(folder):
    file = folder / "model" / "model.safetensors"
    tensors = load_file(file)
    largest = max(tensors, key=lambda name: tensors[name].size)
    tensors[largest].view("u4").flat[0] ^= 1
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (change_data, "train.jsonl' has changed"),
        (change_data_and_continue, "train.jsonl' has changed"),
        (change_config, "config.gin has changed"),
        (change_model, "the file 'model: model.safetensors' has changed"),
    ],
)
def test_a_changed_bit_of_what_the_run_read_is_named(damaged, capsys, change, named):
    change(damaged)
    assert verify(damaged / "run") == 2
    assert named in capsys.readouterr().err


def test_a_checkpoint_that_is_not_the_recorded_one_is_found(damaged, capsys):
    file = damaged / "run" / FINGERPRINTS_FILE
    *before, last = file.read_text().splitlines()
    changed = json.loads(last) | {"trained": "0" * 32}
    file.write_text("\n".join([*before, json.dumps(changed)]) + "\n")
    assert verify(damaged / "run") == 1
    assert "the checkpoint of step 6 has other bits" in capsys.readouterr().out


@pytest.mark.slow
def test_runs_that_cannot_be_made_again_say_why(files, damaged, tmp_path, capsys):
    assert verify(tmp_path) == 2
    assert "not a run directory" in capsys.readouterr().err
    arguments = files.arguments(tmp_path / "sweep")
    assert main(["sweep", *arguments, "--vary", "Run.seed=0,1"]) == 0
    member = next((tmp_path / "sweep").glob("*/config.gin")).parent
    assert verify(member) == 2
    assert "in a sweep of 2 members" in capsys.readouterr().err
    (damaged / "run" / "provenance.json").unlink()
    assert verify(damaged / "run") == 2
    assert "has no provenance.json" in capsys.readouterr().err
