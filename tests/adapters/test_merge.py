"""A model with merged adapters equals the model with separate adapters."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from prompt_tuning.adapters.adapter import Adapter
from prompt_tuning.adapters.merge import write_merged
from prompt_tuning.core.errors import InputError
from prompt_tuning.families.hf_folder import read_config
from tests.support.adapters import (
    assert_same_logits,
    batch_of,
    our_logits,
    peft_logits,
    random_adapter,
    restored,
)
from tests.support.exhaustive import sample
from tests.support.shared_data import FIXTURES

PEFT = FIXTURES / "peft"
FAMILIES = FIXTURES / "families"
FUSED = ("phi3", "gpt_neox")  # one stored tensor holds several projections
MODELS = ("llama_gqa_untied", "qwen2_bias_tied", "gpt2_tied", "t5v11_untied_gated")
CASES = [(model, kind) for model in (*FUSED, *MODELS) for kind in ("LORA", "IA3")]


def folder_of(model):
    return (FAMILIES if model in FUSED else PEFT) / model


def tokens_of(model):
    reference = np.load(folder_of(model) / "ref.npz")
    names = ["input_ids", "attention_mask"] + ["labels"] * model.startswith("t5")
    return {name: reference[name] for name in names}


def adapter_of(model, kind):
    return random_adapter(read_config(folder_of(model) / "base"), kind)


def logits_of(model, base, adapter):
    graph, parameters = restored(base, adapter)
    return np.asarray(our_logits(parameters, batch_of(tokens_of(model)), graph=graph))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "kind"), sample(6, CASES))
def test_merged_logits_equal_those_with_the_adapter(model, kind, tmp_path):
    adapter, base = adapter_of(model, kind), folder_of(model) / "base"
    write_merged(tmp_path / "merged", base, [adapter])
    expected = logits_of(model, base, adapter)
    merged = logits_of(model, tmp_path / "merged", None)
    np.testing.assert_allclose(merged, expected, atol=3e-4)
    assert np.abs(expected - logits_of(model, base, None)).max() > 0.1
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "merged" / name).read_bytes() == (base / name).read_bytes()


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("merged")
    jobs = {}
    for model, kind in CASES:
        tokens, merged = folder / f"{model}.npz", folder / f"{model}-{kind}"
        np.savez(tokens, **tokens_of(model))
        write_merged(merged, folder_of(model) / "base", [adapter_of(model, kind)])
        # In double precision, transformers' softmax of a row that sees no key is NaN.
        double = model != "phi3"
        jobs[f"{model}-{kind}"] = {"base": merged, "tokens": tokens, "double": double}
    return peft_logits(jobs)


@pytest.mark.torch
@pytest.mark.parametrize(("model", "kind"), CASES)
def test_plain_transformers_computes_our_logits(model, kind, theirs):
    ours = logits_of(model, folder_of(model) / "base", adapter_of(model, kind))
    assert_same_logits(ours, theirs[f"{model}-{kind}"], tokens_of(model))


def test_only_adapted_projections_change(tmp_path):
    base = PEFT / "gpt2_tied/base"
    path = "decoder/layers/self_attention/key"
    scale = {f"{path}/adapters/ia3/scale": np.full((2, 16), 2, np.float32)}
    write_merged(tmp_path / "new", base, [Adapter(kind="IA3", parameters=scale)])
    before, after = (
        load_file(x / "model.safetensors") for x in (base, tmp_path / "new")
    )
    assert before.keys() == after.keys()
    for name, array in before.items():
        expected = array.copy()
        if "c_attn" in name:
            # Keys are the second third of the columns, in weights and biases.
            expected[..., 16:32] *= 2
        np.testing.assert_array_equal(after[name], expected)


def test_a_lora_reads_the_input_before_ia3_scales_it(tmp_path):
    base = PEFT / "llama_gqa_untied/base"
    down, name = "decoder/layers/mlp/down", "model.layers.1.mlp.down_proj.weight"
    random = np.random.default_rng(0)
    a, b, scale = (
        random.standard_normal(shape).astype(np.float32)
        for shape in ((3, 24, 2), (3, 2, 16), (3, 24))
    )
    lora = Adapter(
        kind="LORA",
        parameters={f"{down}/adapters/lora/a": a, f"{down}/adapters/lora/b": b},
        scalings={down: 0.5},
    )
    ia3 = Adapter(kind="IA3", parameters={f"{down}/adapters/ia3/scale": scale})
    write_merged(tmp_path / "new", base, [lora, ia3])
    kernel = load_file(base / "model.safetensors")[name].T
    merged = load_file(tmp_path / "new/model.safetensors")[name].T
    x = random.standard_normal(24)
    expected = (x * scale[1]) @ kernel + 0.5 * x @ a[1] @ b[1]
    np.testing.assert_allclose(x @ merged, expected, rtol=1e-4)


def test_a_checkpoint_in_several_files_keeps_its_files(tmp_path):
    whole = PEFT / "llama_gqa_untied/base"
    base = shutil.copytree(whole, tmp_path / "base")
    arrays = load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    files = {"one.safetensors": {}, "two.safetensors": {}}
    for number, (name, array) in enumerate(arrays.items()):
        list(files.values())[number % 2][name] = array
    for file, held in files.items():
        save_file(held, base / file)
    index = {"weight_map": {name: f for f, held in files.items() for name in held}}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    adapter = adapter_of("llama_gqa_untied", "LORA")
    write_merged(tmp_path / "parts", base, [adapter])
    write_merged(tmp_path / "whole", whole, [adapter])
    expected = load_file(tmp_path / "whole/model.safetensors")
    for file, held in files.items():
        for name, array in load_file(tmp_path / "parts" / file).items():
            assert name in held
            np.testing.assert_array_equal(array, expected.pop(name))
    assert not expected
    assert (tmp_path / "parts/model.safetensors.index.json").is_file()


def test_an_adapter_that_does_not_change_weights_is_refused(tmp_path):
    base = PEFT / "llama_gqa_untied/base"
    prompt = adapter_of("llama_gqa_untied", "PROMPT_TUNING")
    with pytest.raises(InputError, match="PROMPT_TUNING does not change weights"):
        write_merged(tmp_path / "new", base, [prompt])
    with pytest.raises(InputError, match="does not belong to LORA of a projection"):
        write_merged(tmp_path / "new", base, [adapter_of("t5v11_untied_gated", "LORA")])
    with pytest.raises(InputError, match="was it trained on another model"):
        write_merged(tmp_path / "new", base, [adapter_of("qwen2_bias_tied", "LORA")])
    assert not (tmp_path / "new").exists()
    with pytest.raises(InputError, match="already; --force"):
        write_merged(base, base, [adapter_of("llama_gqa_untied", "LORA")])
