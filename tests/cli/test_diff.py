"""`diff`, which compares checkpoints, and `convert --variable`."""

import json

import ml_dtypes
import numpy as np
import pytest
from flax import serialization
from safetensors.numpy import save_file

from prompt_tuning.checkpoints.run_store.checkpoint_store import CheckpointStore
from prompt_tuning.cli.main import main

TABLE = np.arange(6, dtype="f4").reshape(2, 3)


def test_parameters_that_differ_are_listed_and_reported(tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    changed = TABLE + np.array([[0, 0, 0], [0, 0.5, 0.25]], "f4")
    nan = np.array([np.nan, 1], "f4")
    shared = {"nan": nan, "scalar": np.array(2, "f4")}
    save_file({"w": TABLE, "old": nan, **shared}, first / "model.safetensors")
    save_file({"w": changed, "new": nan, **shared}, second / "model.safetensors")
    paths, report = ["diff", str(first), str(second)], tmp_path / "report.json"
    assert main([*paths, "--report", str(report)]) == 1
    assert "3 of 5 parameters differ" in capsys.readouterr().out
    results = {r.pop("name"): r for r in json.loads(report.read_text())["results"]}
    assert {name: result["outcome"] for name, result in results.items()} == {
        "nan": "equal",
        "new": "only in the second",
        "old": "only in the first",
        "scalar": "equal",
        "w": "different",
    }
    numbers = {key: results["w"][key] for key in ("unequal", "maximum", "mean")}
    assert numbers == {"unequal": 2, "maximum": 0.5, "mean": 0.125}
    # A report is not replaced unless asked; nothing is compared before.
    assert main([*paths, "--report", str(report)]) == 2
    assert main([*paths[:2], str(first)]) == 0


@pytest.fixture
def forms(tmp_path):
    """Writes one array in each form that is read, under the name that it has there."""
    arrays = {"token_embedder": {"embedding": TABLE}}
    tree = {"version": 3, "optimizer": {"target": arrays}}
    (tmp_path / "t5x").write_bytes(serialization.msgpack_serialize(tree))
    np.save(tmp_path / "array.npy", TABLE)
    np.savez(tmp_path / "arrays.npz", embedding=TABLE)
    tensors = {"embedding": TABLE.astype(ml_dtypes.bfloat16)}
    save_file(tensors, tmp_path / "half.safetensors")
    store = CheckpointStore(tmp_path / "run")
    store.save(1, {"token_embedder/embedding": TABLE}, {}, {})
    store.close()
    # What `remember` and `convert RUN prompt_kv` leave in a run.
    (tmp_path / "run" / "peft").mkdir()
    (tmp_path / "run" / "peft" / "adapter_config.json").write_text("{}")
    for name in ("prompt_kv", "peft/adapter_model"):
        save_file({"other": TABLE}, tmp_path / "run" / f"{name}.safetensors")
    return {
        "t5x": "token_embedder/embedding",
        "array.npy": "array",
        "arrays.npz": "embedding",
        "half.safetensors": "embedding",
        "run": "token_embedder/embedding",
    }


def test_an_array_of_every_form_is_written_as_npy(tmp_path, forms, capsys):
    for index, (source, name) in enumerate(forms.items()):
        target = tmp_path / f"{index}.npy"
        arguments = ["convert", str(tmp_path / source), str(target)]
        assert main([*arguments, f"--variable={name}"]) == 0, capsys.readouterr().err
        np.testing.assert_array_equal(np.load(target), TABLE)
        assert main([*arguments, "--force", "--variable=missing"]) == 2
        assert f"contains ['{name}']" in capsys.readouterr().err
    assert main(["diff", str(tmp_path / "run"), str(tmp_path / "t5x")]) == 0


def test_a_prefix_in_int8_is_compared_by_its_numbers(tmp_path):
    prefix = np.random.default_rng(0).uniform(-1, 1, (1, 2, 3, 1, 4)).astype("f4")
    save_file({"prompt_embeddings": prefix}, tmp_path / "float.safetensors")
    floats, codes = (str(tmp_path / f"{x}.safetensors") for x in ("float", "int8"))
    assert main(["convert", floats, codes, "--to", "int8"]) == 0
    assert main(["diff", floats, codes, "--tolerance", str(1 / 127 / 2)]) == 0
    assert main(["diff", floats, codes]) == 1


def test_tolerance_covers_finite_differences_only(tmp_path):
    for name, last in (("a", 1.0), ("b", 1.25), ("c", np.inf)):
        np.save(tmp_path / f"{name}.npy", np.array([0, last]))
    compared = {
        other: main(
            ["diff", str(tmp_path / "a.npy"), str(tmp_path / other), "--tolerance=0.25"]
        )
        for other in ("b.npy", "c.npy")
    }
    assert compared == {"b.npy": 0, "c.npy": 1}
