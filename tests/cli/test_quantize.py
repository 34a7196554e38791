"""`prompt-tuning quantize`: folders that this library and others read."""

# torch and transformers are only in the `bench` extra.
# pyright: reportMissingImports=false

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from prompt_tuning.cli.main import main
from prompt_tuning.core.quantization.scales_in_codes import (
    DYNAMIC_MAP,
    NestedScales,
)
from prompt_tuning.core.quantization.stores import part_path
from tests.checkpoints.test_published_stores import CONFIG, DOWN, opened
from tests.support import dummies
from tests.support.adapters import batch_of, our_logits
from tests.support.quantized_folders import enlarge
from tests.support.small_runs import write_model

FIXTURES = Path(__file__).parents[1] / "fixtures" / "quantized"
FAMILIES = FIXTURES.parent / "families"
INDEX = "model.safetensors.index.json"
TOKENS = {"input_ids": np.array([[1, 2, 3, 4]]), "attention_mask": np.ones((1, 4), int)}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Writes a model in two files with an index."""
    folder = write_model(tmp_path_factory.mktemp("base") / "model", CONFIG)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-{i % 2 + 1}.safetensors" for i, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file(
            {n: x for n, x in tensors.items() if places[n] == file}, folder / file
        )
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def quantized(base: Path, folder: Path, *options: str) -> Path:
    assert main(["quantize", str(base), str(folder), *options]) == 0
    return folder


def logits(folder: Path, dtype: str | None = None) -> np.ndarray:
    model = opened(folder, dtype)
    return np.asarray(
        our_logits(model.read_parameters(), batch_of(TOKENS), graph=model.graph)
    )


def test_nf4_is_read_as_the_weights_that_are_rounded_on_reading(base, tmp_path, capsys):
    folder = quantized(base, tmp_path / "nf4")
    table = capsys.readouterr().out
    assert "down_proj" in table and "instead of" in table
    held, rounded = opened(folder).plan, opened(base, "nf4").plan.restore()
    assert str(held.stores[DOWN]) == "nf4 in groups of 64"
    restored = held.restore()
    for path in held.quantized:
        for part in (path, part_path(path, "scale"), part_path(path, "codebook")):
            np.testing.assert_array_equal(restored[part], rounded[part])
    # All other tensors and files are the same.
    files = {path.name for path in base.iterdir()}
    assert {path.name for path in folder.iterdir()} == files
    name = "model.embed_tokens.weight"
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    ours, theirs = (load_file(path / places[name])[name] for path in (folder, base))
    np.testing.assert_array_equal(ours, theirs)
    assert places["model.layers.0.mlp.up_proj.weight.absmax"] in files


def test_quantized_weights_are_compared_as_the_numbers_that_they_stand_for(
    base, tmp_path, capsys
):
    """Rounding to 127 steps moves a number by at most half a step."""
    folder = quantized(base, tmp_path / "int8", "--store", "int8")
    largest = max(
        float(np.abs(x).max())
        for file in base.glob("*.safetensors")
        for x in load_file(file).values()
    )
    half = largest / 127 / 2
    paths = ["diff", str(base), str(folder), "--tolerance"]
    assert main([*paths, str(1.01 * half)]) == 0, capsys.readouterr().out
    assert main([*paths, str(half / 100)]) == 1
    assert "only in" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("options", [("int4", "--group", "64"), ("int8",)])
def test_integers_are_read_as_they_were_written(options, base, tmp_path):
    folder = quantized(base, tmp_path / "model", "--store", *options)
    assert opened(folder).plan.stores[DOWN].name == options[0]
    np.testing.assert_allclose(logits(folder), logits(folder, "float32"), atol=1e-5)
    exact = logits(base, "float32")
    change = np.linalg.norm(logits(folder) - exact) / np.linalg.norm(exact)
    assert change < (0.4 if options[0] == "int4" else 0.03)


@pytest.mark.torch
@pytest.mark.parametrize("store", ["nf4", "int4", "int8"])
def test_transformers_computes_the_same(store, base, tmp_path):
    library = "bitsandbytes" if store == "nf4" else "compressed_tensors"
    pytest.importorskip(library)
    import torch
    from transformers import AutoModelForCausalLM

    options = ["--group", "64"] * (store == "int4")
    folder = quantized(base, tmp_path / "model", "--store", store, *options)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map="cpu"
    )
    with torch.no_grad():
        theirs = model(torch.tensor(TOKENS["input_ids"])).logits.numpy()
    np.testing.assert_allclose(logits(folder), theirs, atol=1e-4)


@pytest.mark.torch
@pytest.mark.parametrize("store", ["int4", "int8"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_transformers_computes_the_same_with_experts(family, store, tmp_path):
    pytest.importorskip("compressed_tensors")
    import torch
    from transformers import AutoModelForCausalLM

    base = enlarge(FAMILIES / family / "base", tmp_path / "base", 8)
    options = ["--group", "32"] * (store == "int4")
    folder = quantized(base, tmp_path / "model", "--store", store, *options)
    assert opened(folder).plan.stores["decoder/layers/mlp/expert_up"].name == store
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map="cpu"
    )
    with torch.no_grad():
        theirs = model(torch.tensor(TOKENS["input_ids"])).logits.numpy()
    np.testing.assert_allclose(logits(folder), theirs, atol=1e-4)


def test_experts_without_a_layout_stay_as_they_are(tmp_path, capsys):
    folder = quantized(FAMILIES / "mixtral/base", tmp_path / "nf4")
    assert "of experts stay as they are" in capsys.readouterr().out
    stores = opened(folder).plan.stores
    assert stores["decoder/layers/mlp/expert_up"].name == "float32"
    assert stores["decoder/layers/self_attention/query/kernel"].name == "nf4"


def test_what_cannot_be_quantized_is_refused(base, tmp_path, capsys):
    def refused(*arguments: object) -> str:
        assert main(["quantize", *map(str, arguments)]) == 2
        return " ".join(capsys.readouterr().err.split())

    folder = quantized(base, tmp_path / "model")
    assert "rounded twice" in refused(folder, tmp_path / "again")
    assert f"{folder} contains" in refused(base, folder)
    message = refused(base, tmp_path / "new", "--store", "int4")
    assert "192 inputs, which groups of 128 do not divide" in message
    assert "--group, e.g. 64" in message
    gpt2 = write_model(tmp_path / "gpt2", dummies.GPT2)
    assert "stores no projections as [out, in]" in refused(gpt2, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    config = dataclasses.replace(CONFIG, layers=1)
    damaged = write_model(tmp_path / "damaged", config)
    tensors = load_file(damaged / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 4] = np.nan
    save_file(tensors, damaged / "model.safetensors")
    message = refused(damaged, tmp_path / "new")
    assert "up_proj.weight in" in message and "not finite" in message
    assert not (tmp_path / "new").exists()


def test_scales_are_rounded_as_bitsandbytes_rounds_them():
    """The fixtures hold one weight, quantized by bitsandbytes with either scales."""
    plain, nested = (
        load_file(FIXTURES / f"{name}.safetensors")
        for name in ("bitsandbytes_nf4", "bitsandbytes_nf4_nested")
    )
    rounded = NestedScales.of(plain["m.weight.absmax"])
    np.testing.assert_array_equal(rounded.codes, nested["m.weight.absmax"])
    np.testing.assert_array_equal(rounded.largest, nested["m.weight.nested_absmax"])
    # PyTorch rounds some of the evenly spaced numbers otherwise; a folder has its map.
    np.testing.assert_allclose(DYNAMIC_MAP, nested["m.weight.nested_quant_map"], 2e-7)
    state = json.loads(nested["m.weight.quant_state.bitsandbytes__nf4"].tobytes())
    assert rounded.offset == state["nested_offset"]


@pytest.mark.slow
def test_double_quantization_writes_scales_in_a_byte_each(base, tmp_path):
    small, large = (
        quantized(base, tmp_path / str(len(options)), *options)
        for options in (["--double_quantization"], [])
    )
    scales = {
        name: array.dtype
        for file in small.glob("*.safetensors")
        for name, array in load_file(file).items()
        if name.endswith(".absmax")
    }
    assert len(scales) == 14 and set(scales.values()) == {np.dtype(np.uint8)}
    settings = json.loads((small / "config.json").read_text())["quantization_config"]
    assert settings["bnb_4bit_use_double_quant"] is True
    np.testing.assert_allclose(logits(small), logits(large), atol=0.05)


def test_scales_of_another_store_stay_wide(base, tmp_path, capsys):
    folder = tmp_path / "int4"
    options = ["--store", "int4", "--double_quantization"]
    assert main(["quantize", str(base), str(folder), *options]) == 2
    assert "--double_quantization is for nf4" in capsys.readouterr().err
    assert not folder.exists()
