"""Runs the commands on models whose block weights are not on the device."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from prompt_tuning.checkpoints.run_store.checkpoint_names import FOLDER
from prompt_tuning.cli.main import main
from prompt_tuning.pretrained.frozen_fingerprint import fingerprint
from prompt_tuning.pretrained.prompted_model import open_pretrained
from prompt_tuning.settings.pretrained import Pretrained
from tests.support import methods
from tests.support.exhaustive import sample
from tests.support.small_runs import (
    DECODER,
    T5,
    logged,
    trained_prompt,
    tune,
    write_model,
)

STEPS = 6
CHOICES = {"Run.accumulate": 2, "DataSource.buckets": 2}
LAYERS = 3
MODELS = {
    "decoder": dataclasses.replace(DECODER, layers=LAYERS),
    "t5": dataclasses.replace(T5, layers=LAYERS),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    folders = {name: write_model(folder / name, x) for name, x in MODELS.items()}
    return folders | {"gpt2": methods.write_gpt2(folder / "gpt2")}


@pytest.fixture(scope="module")
def run_of(files, models, tmp_path_factory):
    """Run directory of each model and weight location, trained once."""
    runs = {}

    def run(weights, model="decoder"):
        if (weights, model) not in runs:
            directory = tmp_path_factory.mktemp("run") / f"{weights}_{model}"
            choices = CHOICES | {"Pretrained.weights": weights}
            assert tune(files, directory, models[model], **choices) == 0
            runs[weights, model] = directory
        return runs[weights, model]

    return run


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("weights", "model"),
    sample(
        1, [("streamed", "decoder"), ("streamed", "t5"), ("pinned_host", "decoder")]
    ),
)
def test_a_streamed_run_learns_and_measures_the_same_as_one_on_the_device(
    run_of, weights, model
):
    here, there = run_of("device", model), run_of(weights, model)
    ours, theirs = (
        np.frombuffer(trained_prompt(directory, STEPS)[128:], np.float32)
        for directory in (there, here)
    )
    # Adafactor amplifies the rounding of small gradients; single steps agree to 1e-6.
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    for actual, expected in zip(logged(there), logged(here), strict=True):
        for name in ("loss", "evaluation/loss"):
            if name in expected:
                np.testing.assert_allclose(actual[name], expected[name], rtol=1e-5)


@pytest.mark.exhaustive
def test_a_streamed_run_resumes_to_the_same_bits(run_of, files, models, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(run_of("streamed"), directory)
    shutil.rmtree(directory / FOLDER / f"checkpoint_{STEPS}")
    choices = CHOICES | {"Pretrained.weights": "streamed"}
    assert tune(files, directory, models["decoder"], **choices) == 0
    expected = trained_prompt(run_of("streamed"), STEPS)
    assert trained_prompt(directory, STEPS) == expected


@pytest.mark.slow
def test_a_streamed_run_is_measured_streamed_and_on_the_device(run_of, capsys):
    run = ["evaluate", "--run", str(run_of("streamed"))]
    capsys.readouterr()
    tables = []
    for weights in ("streamed", "device", "pinned_host"):
        assert main([*run, f"--gin.Pretrained.weights={weights!r}"]) == 0
        tables.append(capsys.readouterr().out)
    assert "loss" in tables[0]
    assert tables == tables[:1] * 3


def test_prompts_are_inspected_and_exported_without_the_weights(
    run_of, capsys, tmp_path
):
    directory = run_of("streamed")
    assert main(["inspect", "--run", str(directory)]) == 0
    assert "norm" in capsys.readouterr().out
    target = tmp_path / "prompt.npy"
    assert main(["convert", str(directory), str(target)]) == 0
    trained = np.frombuffer(trained_prompt(directory, STEPS)[128:], np.float32)
    np.testing.assert_array_equal(np.load(target).ravel(), trained)


@pytest.mark.exhaustive
def test_texts_are_continued_from_every_location(run_of, capsys):
    run = ["generate", "--run", str(run_of("streamed")), "--new_tokens", "2", "ab="]
    capsys.readouterr()
    results = []
    for weights in ("streamed", "pinned_host", "device"):
        assert main([*run, f"--gin.Pretrained.weights={weights!r}"]) == 0
        results.append(capsys.readouterr().out)
    assert results == results[:1] * 3


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"Pretrained.weights": "cpu"}, "expected one of 'device', 'pinned_host'"),
        ({"Rematerialization.policy": "nothing"}, "leave out rematerialization"),
        (
            {"ParameterGroup.regexes": [".*/prompt/.*", "decoder/layers/.*"]},
            "train every weight of the blocks",
        ),
    ],
)
def test_options_unsupported_by_streaming_are_refused(
    files, models, tmp_path, capsys, choices, message
):
    choices = {"Pretrained.weights": "streamed"} | choices
    assert tune(files, tmp_path / "run", models["decoder"], **choices) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("decoder", "bfloat16"),
        ("t5", "float32"),
        ("t5", "int8"),
        ("gpt2", "float32"),
        ("gpt2", "int8"),
    ],
)
def test_layers_equal_the_whole_models(models, model, dtype):
    """Covers fused and transposed arrays, and int8 with its scales, layer by layer."""
    source = Pretrained(checkpoint=str(models[model]), parameter_dtype=dtype)
    here = open_pretrained(source, key=jax.random.key(0)).read_parameters()
    source = dataclasses.replace(source, weights="streamed")
    streamed = open_pretrained(source, key=jax.random.key(0))
    weights, rest = streamed.weight_storage.streamed, streamed.read_parameters()
    assert weights.keys() == {path for path in here if "/layers/" in path}
    assert rest.keys() == here.keys() - weights.keys()
    for path, weight in weights.items():
        layers = np.stack([weight.read(i) for i in range(weight.shape[0])])
        assert weight.nbytes == layers.nbytes
        np.testing.assert_array_equal(layers, here[path])
    # The digest that identifies the model is the same for every weight location.
    assert fingerprint(streamed.weight_storage.with_streamed(rest)) == fingerprint(here)
