"""Input that cannot be used: exit code 2, a message, and nothing done.

Each test checks that the message has the value found and the value expected.
"""

import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import h5py
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from prompt_tuning.checkpoints.run_store import checkpoint_files
from prompt_tuning.checkpoints.run_store.checkpoint_names import FOLDER
from prompt_tuning.cli.main import main
from prompt_tuning.training import opening
from tests.support.small_runs import LENGTH, tune, write_pairs, write_rows

GOOD = [("ab=", "AB"), ("cd=", "CD")]
Refused = Callable[..., str]


@pytest.fixture
def refused(files, tmp_path, capsys, monkeypatch) -> Refused:
    """Trains, expects exit code 2, and returns the message without line breaks."""
    directory = tmp_path / "run"
    monkeypatch.setattr(opening, "compile_step", lambda *_, **__: never_called)

    def run(model: Path | None = None, *more: str, **choices) -> str:
        arguments = ["train", *files.arguments(directory, model, **choices), *more]
        assert main(arguments) == 2
        assert not directory.exists()
        return message(capsys)

    return run


def never_called(*_):
    raise AssertionError("the step ran on input that cannot be used")


def message(capsys) -> str:
    printed = capsys.readouterr().err
    assert printed.startswith("prompt-tuning ")
    assert "Traceback" not in printed and "In call to configurable" not in printed
    assert len(printed) < 1200
    return " ".join(printed.split())


@pytest.fixture
def rows(tmp_path) -> Path:
    """A valid HDF5 file for the test to damage."""
    return write_rows(tmp_path / "rows.hdf5", GOOD)


@pytest.fixture
def model(files, tmp_path) -> Path:
    """A copy of the decoder's folder for the test to damage."""
    return shutil.copytree(files.decoder, tmp_path / "model")


def test_missing_data(refused, tmp_path):
    path = tmp_path / "nowhere.hdf5"
    assert f"data file {path} not found" in refused(TRAIN_FILES=str(path))


def test_truncated_data(refused, rows):
    rows.write_bytes(rows.read_bytes()[:-400])
    message = refused(TRAIN_FILES=str(rows))
    assert f"{rows} cannot be opened as HDF5 (is it truncated" in message


def test_data_that_is_not_hdf5(refused, rows):
    rows.write_text("id,text\n")
    message = refused(TRAIN_FILES=str(rows))
    assert f"{rows} cannot be opened as HDF5" in message


def replace(rows: Path, **arrays) -> str:
    with h5py.File(rows, "a") as file:
        for name, array in arrays.items():
            del file[name]
            if array is not None:
                file[name] = array
    return str(rows)


def value(rows: Path, name: str, number: int) -> str:
    with h5py.File(rows, "a") as file:
        data_set = file[name]
        assert isinstance(data_set, h5py.Dataset)
        data_set[1, 2] = number
    return str(rows)


def test_a_missing_dataset(refused, rows):
    message = refused(TRAIN_FILES=replace(rows, input_ids=None))
    assert "has the data sets ['token_type_ids'], expected 'input_ids'" in message


def test_a_dataset_with_another_shape(refused, rows):
    message = refused(TRAIN_FILES=replace(rows, token_type_ids=np.zeros((2, 9), "i4")))
    assert (
        "token_type_ids has shape (2, 9), expected (2, 24), the shape of input_ids"
        in message
    )


def test_a_dataset_with_another_type(refused, rows):
    message = refused(TRAIN_FILES=replace(rows, input_ids=np.zeros((2, 24), "f4")))
    assert "input_ids has type float32, expected an integer type" in message


def test_a_token_outside_the_vocabulary(refused, rows):
    message = refused(TRAIN_FILES=value(rows, "input_ids", 61))
    assert "row 1, token 2: input_ids is 61, expected 0 to 60" in message


def test_an_unknown_token_type(refused, rows):
    message = refused(TRAIN_FILES=value(rows, "token_type_ids", 4))
    assert "row 1, token 2: token_type_ids is 4, expected 0 to 3" in message


def test_rows_without_learned_tokens(refused, rows):
    types = np.zeros((2, 24), "i4")
    message = refused(TRAIN_FILES=replace(rows, token_type_ids=types))
    assert "row 0: no token has a loss weight, expected at least one" in message


def test_a_row_that_does_not_fit_with_the_prompt(refused, tmp_path):
    # BOS, 58 letters and EOS are 60 tokens: 64 positions without 4 vectors.
    data = write_pairs(tmp_path / "long.jsonl", [("", "a" * 58), ("", "a" * 59)])
    message = refused(TRAIN_FILES=str(data))
    assert (
        "line 2: 61 tokens, expected at most 60 (the model's positions minus" in message
    )


def test_a_prompt_longer_than_the_maximum_position(refused):
    message = refused(None, "--gin_file=prompts/uniform.gin", PROMPT_LENGTH=64)
    assert "a prompt of 64 vectors leaves no room for text" in message
    assert "64 positions" in message


def test_a_character_outside_the_vocabulary(refused, tmp_path):
    data = write_pairs(tmp_path / "odd.jsonl", [("h\u00e9=", "X")])
    message = refused(TRAIN_FILES=str(data))
    assert "the text 'h\u00e9=' cannot be encoded" in message


def test_a_line_that_is_not_a_pair(refused, tmp_path):
    data = tmp_path / "pairs.jsonl"
    data.write_text('{"prompt": "a=", "answer": "A"}\n')
    message = refused(TRAIN_FILES=str(data))
    assert (
        "line 1: found the keys ['answer', 'prompt'], expected 'completion'" in message
    )


def test_truncated_weights(refused, model):
    file = model / "model.safetensors"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-100])
    message = refused(model)
    assert (
        f"{file} has {size - 100:,} bytes, but its header describes {size:,}" in message
    )


def test_a_missing_tensor(refused, model):
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, model / "model.safetensors")
    message = refused(model)
    assert "decoder/layers/mlp/up/kernel" in message
    assert "model.layers.0.mlp.up_proj.weight" in message


def test_a_tensor_with_another_shape(refused, model):
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] = np.ones(17, np.float32)
    save_file(tensors, model / "model.safetensors")
    message = refused(model)
    assert "model.norm.weight" in message and "(17,)" in message and "(16,)" in message


def test_an_unknown_kind_of_model(refused, model):
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"model_type": "mamba3"}))
    message = refused(model)
    assert "has model_type = 'mamba3', expected one of the " in message
    assert "in prompt_tuning/families/README.md, such as mamba, mamba2" in message


def test_a_missing_model(refused, tmp_path):
    message = refused(tmp_path / "nowhere")
    assert f"{tmp_path / 'nowhere'} does not exist; expected a Hugging Face" in message


@pytest.mark.parametrize("dtype", ["compute_dtype", "parameter_dtype"])
def test_float16(refused, dtype):
    message = refused(**{f"Pretrained.{dtype}": "float16"})
    assert f"{dtype} is 'float16': float16 overflows at 65,504" in message


def test_a_prompt_file_with_another_width(refused, tmp_path):
    np.save(tmp_path / "prompt.npy", np.zeros((LENGTH, 17), np.float32))
    message = refused(
        None,
        "--gin_file=prompts/file.gin",
        f"--gin.PROMPT_FILE={str(tmp_path / 'prompt.npy')!r}",
    )
    assert f"prompt.npy has shape ({LENGTH}, 17), expected ({LENGTH}, 16)" in message


def test_a_class_label_without_a_token(refused):
    message = refused(
        None, "--gin_file=prompts/class_labels.gin", "--gin.CLASS_LABELS=['a', '']"
    )
    assert "the text '' has no tokens" in message


def test_a_regex_without_a_match(refused):
    message = refused(**{"ParameterGroup.regexes": [".*/prompts/.*"]})
    assert "'.*/prompts/.*' matches no parameter" in message
    assert "decoder/prompt/prompt" in message


def test_a_learning_rate_of_an_unused_optimizer(refused):
    found = refused(None, "--gin.adamw.learning_rate=0.5")
    assert "--gin.adamw.learning_rate has no effect" in found
    assert "effect: --gin.adafactor.learning_rate=@warmup_linear_decay()" in found


def test_an_unused_scope(refused):
    found = refused(None, "--gin.test/DataSource.batch_size=8")
    assert "--gin.test/DataSource.batch_size has no effect" in found
    assert "--gin.train/DataSource.batch_size=%BATCH_SIZE" in found


def test_a_fresh_adapter_without_a_group(refused):
    """The run's file, given after the adapter's, trains a soft prompt alone."""
    bindings = ["--gin.Run.adapters=[@LoRA()]", "--gin.LoRA.regexes=['.*/query']"]
    message = refused(None, *bindings)
    assert "adapters/lora/b are fresh but not trained" in message
    assert "the parameter groups train .*/prompt/.*" in message


def test_a_constant_prompt_is_not_trained(refused, tmp_path):
    np.save(tmp_path / "prompt.npy", np.ones((LENGTH, 16), np.float32))
    constant = "--gin_file=prompts/inference_only.gin"
    message = refused(None, constant, PROMPT_FILE=str(tmp_path / "prompt.npy"))
    assert "the run's prompt is a constant without parameters" in message
    assert "prompts/file.gin" in message


@pytest.mark.parametrize(
    ("binding", "problem", "expected"),
    [
        ("Run.stepz=3", "Run.stepz=3 cannot be used", "did you mean steps"),
        ("Rum.steps=3", "No configurable matching 'Rum'", "did you mean Run"),
        ("Run.prompt=@SoftPromt", "SoftPromt", "did you mean SoftPrompt"),
        ("MODEL=folder", "--gin.MODEL=folder cannot be used", "text needs quotes"),
        ("MODEL=/a/folder", "MODEL = /a/folder", "text needs quotes"),
        ("CLASS_LABELS=['a'", "--gin.CLASS_LABELS=['a' cannot be used", ""),
        ("Run.steps=0", "Run.steps is 0", "expected at least 1"),
        ("PROMPT_LENGTH='4'", "SoftPrompt.length is '4'", "expected int"),
        ("PROMPT_LENGTH=0", "SoftPrompt.length is 0", "expected a number from 1"),
        ("Run.model=%MODLE", "it needs MODLE", "set --gin.MODLE=..."),
        ("Run.keep_best=('f1', 'max')", "'f1'", "measures loss, accuracy"),
        ("Run.keep_best='label_accuracy'", "'label_accuracy'", "ask for it"),
        ("Run.keep_best='f1'", "'f1'", "one of the metrics loss, cross_entropy"),
        ("Run.early_stopping_metric='f1'", "'f1'", "one of the metrics loss"),
        ("Prompting.placement='middle'", "'middle'", "expected one of 'prefix'"),
    ],
)
def test_an_invalid_binding(refused, binding, problem, expected):
    message = refused(None, f"--gin.{binding}")
    assert problem in message and expected in message


def test_a_missing_config(refused):
    message = refused(None, "--gin_file=runs/first_promt.gin")
    assert "runs/first_promt.gin is missing" in message
    assert "names are searched in the working directory and in" in message


def test_a_missing_include(refused, tmp_path):
    config = tmp_path / "mine.gin"
    config.write_text("Run.seed = 1\ninclude 'models/mine.gin'\n")
    message = refused(None, f"--gin_file={config}")
    assert "models/mine.gin is missing" in message
    assert f'In file "{config}", line 2' in message


def test_macros_without_a_value(capsys):
    assert main(["train", "--gin_file=runs/first_prompt.gin"]) == 2
    error = message(capsys)
    assert "it needs EVALUATION_FILES, MODEL, RUN_DIRECTORY, TRAIN_FILES" in error


def test_a_folder_named_like_a_package_does_not_hide_configs(tmp_path, monkeypatch):
    """gin searches importable packages for includes, and `runs` is one here."""
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["train", "--gin_file=runs/first_prompt.gin"]) == 2


def snapshot(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def run(files, tmp_path_factory) -> Path:
    """A finished run."""
    directory = tmp_path_factory.mktemp("finished") / "run"
    assert tune(files, directory) == 0
    return directory


@pytest.mark.slow
def test_a_directory_with_another_config(run, files, capsys):
    before = snapshot(run)
    assert tune(files, run, PROMPT_LENGTH=5) == 2
    printed = capsys.readouterr()
    error = printed.err.replace("\n", " ")
    # Refused before the model is read.
    assert "restored" not in printed.out
    assert f"{run} belongs to a run with another config" in error
    assert "PROMPT_LENGTH = 4, now 5 (used by SoftPrompt.length)" in error
    assert f"--gin.Run.start_from='\"{run}\"'" in error
    assert snapshot(run) == before


@pytest.mark.slow
def test_a_full_disk(files, tmp_path, capsys, monkeypatch):
    """The previous checkpoint stays, and the same command continues from it."""
    write, full = checkpoint_files.write_files, OSError(errno.ENOSPC, "No space left")

    def last_fails(directory, *content):
        if "checkpoint_6" in directory.name:
            raise full
        write(directory, *content)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_files, "write_files", last_fails)
        assert tune(files, tmp_path / "run") == 1
    error = message(capsys)
    assert "checkpoint_6 could not be written" in error
    assert "No space left; that of step 3 is kept. Free some space" in error
    assert tune(files, tmp_path / "run") == 0
    assert "resuming from step 3" in capsys.readouterr().out


def test_a_directory_with_another_model(run, files, tmp_path, capsys):
    """The path is the same, but the model at it has changed."""
    moved = files.decoder.rename(tmp_path / "moved")
    shutil.copytree(moved, files.decoder)
    tensors = load_file(moved / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    save_file(tensors, files.decoder / "model.safetensors")
    before = snapshot(run)
    try:
        assert tune(files, run) == 2
    finally:
        shutil.rmtree(files.decoder)
        moved.rename(files.decoder)
    assert "belongs to a run with another frozen_model" in message(capsys)
    assert snapshot(run) == before


def test_all_checkpoints_are_damaged(run, tmp_path, capsys):
    copy = shutil.copytree(run, tmp_path / "copy")
    for file in copy.joinpath(FOLDER).rglob("*.npy"):
        file.write_bytes(b"")
    assert main(["generate", "--run", str(copy), "hello="]) == 2
    assert "are damaged (steps [3, 6])" in message(capsys)


def test_a_directory_that_is_not_a_run(tmp_path, capsys):
    assert main(["inspect", "--run", str(tmp_path)]) == 2
    expected = f"{tmp_path} is not a run directory: it has no config.gin"
    assert expected in message(capsys)


def test_a_prompt_of_a_different_width(run, tmp_path, capsys):
    np.save(tmp_path / "prompt.npy", np.zeros((LENGTH, 17), np.float32))
    given = ("--run", str(run), "--prompt", str(tmp_path / "prompt.npy"))
    for command in ("evaluate", "inspect"):
        assert main([command, *given]) == 2
        error = message(capsys)
        assert "(4, 17)" in error and "(4, 16)" in error


def test_a_completion_that_is_not_a_label(run, capsys):
    labels = "--gin.Evaluation.labels=['yes', 'no']"
    assert main(["evaluate", "--run", str(run), labels]) == 2
    assert "which is none of the labels ['yes', 'no']" in message(capsys)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--new_tokens=99"], "99 new ones do not fit: the model has 64 positions"),
        (["h\u00e9=", "--new_tokens=4"], "the text 'h\u00e9=' cannot be encoded"),
    ],
)
def test_generation_with_invalid_options(run, options, problem, capsys):
    assert main(["generate", "--run", str(run), "hello=", *options]) == 2
    assert problem in message(capsys)


def test_an_answer_that_would_not_fit_is_refused_before_training(refused):
    choices = {"Evaluation.exact_match": True, "Evaluation.new_tokens": 60}
    assert "60 new ones do not fit" in refused(**choices)


ONE_AFTER_THE_OTHER = """
import contextlib, io, json, sys
from prompt_tuning.cli.main import main

found = []
for arguments in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        found.append([main(arguments), errors.getvalue()])
print(json.dumps(found))
"""


def refused_without_type_checks(directory: Path, bindings: Sequence[str]) -> list[str]:
    """Messages of a separate process, in which no hook checks argument types."""
    start = ["train", "--gin_file", "runs/first_prompt.gin"]
    # Paths are checked before the values of settings are.
    data = directory.with_name("data.jsonl")
    data.touch()
    macros = {
        "MODEL": "bundled:skills-decoder",
        "TRAIN_FILES": data,
        "EVALUATION_FILES": data,
        "RUN_DIRECTORY": directory,
    }
    start += [f"--gin.{name}='{value}'" for name, value in macros.items()]
    done = subprocess.run(
        [sys.executable, "-c", ONE_AFTER_THE_OTHER],
        input=json.dumps([[*start, f"--gin.{binding}"] for binding in bindings]),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    parsed = json.loads(done.stdout.splitlines()[-1])
    assert [code for code, _ in parsed] == [2] * len(bindings), parsed
    assert not directory.exists()
    return [error for _, error in parsed]


@pytest.mark.slow
def test_values_of_the_wrong_type(tmp_path):
    cases = [
        ("STPES=3", ("no setting STPES in this config; did you mean", "STEPS")),
        ("Run.keep_best=('loss', 'lowest')", ("Run.keep_best", "'min' or 'max'")),
        ("Run.groups=@ParameterGroup()", ("Run.groups is not a list",)),
        ("Run.model=@Pretrained", ("Run.model", "expected @Pretrained()")),
        ("ParameterGroup.optimizer=@adafactor", ("expected an optax", "@adafactor()")),
        ("ParameterGroup.regexes='.*'", ("regexes is '.*'", "list of strings")),
        ("adafactor.learning_rate='0.3'", ("learning_rate is '0.3'", "a number")),
    ]
    bindings = [binding for binding, _ in cases]
    messages = refused_without_type_checks(tmp_path / "run", bindings)
    for (binding, words), message in zip(cases, messages, strict=True):
        assert all(word in message for word in words), (binding, message)
        assert "Traceback" not in message


def test_prefix_attention_excludes_learning_prompt_tokens(files, tmp_path, capsys):
    macros = {"Prompting.prefix_attention": True, "DataSource.prompt_loss_weight": 1.0}
    assert tune(files, tmp_path / "run", **macros) == 2
    assert "would see its own target" in capsys.readouterr().err


@pytest.mark.slow
def test_a_changed_model_is_not_used_with_a_runs_prompt(files, tmp_path, capsys):
    assert tune(files, tmp_path / "run") == 0
    record = tmp_path / "run" / "run.json"
    record.write_text(json.dumps({"frozen_model": "another"}))
    capsys.readouterr()
    assert main(["generate", "--run", str(tmp_path / "run"), "a="]) == 2
    assert "another frozen_model" in capsys.readouterr().err
