"""An adapter written by either library changes both models in the same way."""

# PEFT and transformers are in the `bench` extra only.
# pyright: reportMissingImports=false

import dataclasses
import functools

import numpy as np
import pytest

from prompt_tuning.adapters.peft.folder import read_folder, write_folder
from prompt_tuning.adapters.peft.peft_conversion import from_peft, to_peft
from prompt_tuning.families.hf_folder import read_config
from tests.support.adapters import (
    assert_same_logits,
    batch_of,
    our_logits,
    peft_logits,
    random_adapter,
    restored,
)
from tests.support.shared_data import FIXTURES

PEFT = FIXTURES / "peft"
CASES = [
    f"{path.parent.parent.name}/{path.parent.name}"
    for path in sorted(PEFT.glob("*/*/adapter_config.json"))
]
TOKENS = ("input_ids", "attention_mask")
TASK_IDS = [0, 1, 2]


@functools.cache
def reference(model):
    return dict(np.load(PEFT / model / "ref.npz"))


def config_of(model):
    return read_config(PEFT / model / "base")


def tokens_of(model):
    names = (*TOKENS, "labels") if model.startswith("t5") else TOKENS
    return {name: reference(model)[name] for name in names}


def read(case):
    folder = PEFT / case
    config = read_config(folder.parent / "base")
    return from_peft(read_folder(folder), config, case)


def logits_of(model, adapter):
    task_ids = TASK_IDS if adapter.kind.startswith("MULTI") else None
    graph, parameters = restored(PEFT / model / "base", adapter)
    batch = batch_of(tokens_of(model), task_ids)
    return our_logits(parameters, batch, graph=graph)


MODELS = (
    "llama_gqa_untied",
    "gpt2_tied",
    "qwen2_bias_tied",
    "t5v11_untied_gated",
    "t5_orig_tied_relu",
)
STABILISED = "qwen2_bias_tied"
OURS = {
    f"{model} {kind} {regex}".strip(): (model, kind, regex)
    for model in MODELS
    for kind, regex in (
        ("PROMPT_TUNING", ""),
        ("PREFIX_TUNING", ""),
        ("MULTITASK_PROMPT_TUNING", ""),
        ("LORA", ""),
        ("IA3", ""),
        ("LORA", "decoder/layers/self_attention/value"),
        ("IA3", "decoder/layers/mlp"),
        ("CARTRIDGE", ""),
        ("CPT", ""),
    )
    if not (model.startswith("t5") and kind in ("CARTRIDGE", "CPT"))
}
FORMS = {
    "CARTRIDGE": ("PREFIX_TUNING", {"num_frozen_tokens": 2}),
    "CPT": ("PROMPT_TUNING", {"cpt_token_ids": [5, 6, 7, 8, 9]}),
}
"""Methods of PEFT whose files are those of another one, with more settings."""


def made(model, kind, regex):
    """Returns a random adapter of a kind for a model."""
    form, settings = FORMS.get(kind, (kind, {}))
    adapter = random_adapter(config_of(model), form, regex)
    if settings:
        adapter = dataclasses.replace(adapter, settings={"peft_type": kind} | settings)
    return adapter


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """PEFT's logits with our adapters, each written with default settings.

    The adapters of one model have alpha divided by the square root of the rank.
    """
    folder = tmp_path_factory.mktemp("peft")
    jobs = {}
    for model in MODELS:
        np.savez(folder / f"{model}.npz", **tokens_of(model))

    def add(name, model, adapter, **settings):
        base, number = PEFT / model / "base", str(len(jobs))
        exported = to_peft(adapter, config_of(model), base_model=str(base))
        write_folder(folder / number, exported)
        jobs[name] = {
            "base": base,
            "adapter": folder / number,
            "tokens": folder / f"{model}.npz",
            "task_ids": TASK_IDS if adapter.kind.startswith("MULTI") else None,
            **settings,
        }

    for name, (model, kind, regex) in OURS.items():
        adapter = made(model, kind, regex)
        if model == STABILISED and kind == "LORA":
            settings = {"peft_type": "LORA", "use_rslora": True}
            adapter = dataclasses.replace(adapter, settings=settings)
        add(name, model, adapter, double=True)
    for case in CASES:
        bare = dataclasses.replace(read(case), settings={}, unused=None)
        add(case, case.split("/")[0], bare)
    return peft_logits(jobs)


@pytest.mark.torch
@pytest.mark.parametrize("case", CASES)
def test_peft_reads_its_own_adapter_from_our_settings(case, theirs):
    model, name = case.split("/")
    expected = reference(model)[f"{name}.logits"]
    np.testing.assert_allclose(theirs[case], expected, atol=3e-5)


@pytest.mark.torch
@pytest.mark.parametrize("name", OURS)
def test_our_files_change_pefts_model_as_ours(name, theirs):
    model, kind, regex = OURS[name]
    ours = logits_of(model, made(model, kind, regex))
    assert_same_logits(ours, theirs[name], tokens_of(model))
    base = reference(model)["base.logits"]
    assert np.abs(theirs[name][:, -base.shape[1] :] - base).max() > 0.1


def save_by_peft(base, folder):
    """Writes a cartridge and CPT with the values that PEFT begins with."""
    from peft import CartridgeConfig, CPTConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    settings = {"task_type": "CAUSAL_LM", "base_model_name_or_path": str(base)}
    for name, config in {
        "CARTRIDGE": CartridgeConfig(num_virtual_tokens=3, **settings),
        "CPT": CPTConfig(cpt_token_ids=[5, 6, 7], **settings),
    }.items():
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
        model.save_pretrained(folder / name)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")  # of PEFT and transformers
def test_cartridges_and_cpt_of_peft_are_read_and_written_as_they_are(tmp_path):
    model = "llama_gqa_untied"
    base, config = PEFT / model / "base", config_of(model)
    save_by_peft(base, tmp_path)
    np.savez(tmp_path / "tokens.npz", **tokens_of(model))
    jobs = {
        kind: {
            "base": base,
            "adapter": tmp_path / kind,
            "tokens": tmp_path / "tokens.npz",
        }
        for kind in FORMS
    }
    expected = peft_logits(jobs)
    for kind, (form, _) in FORMS.items():
        folder = read_folder(tmp_path / kind)
        adapter = from_peft(folder, config, kind)
        assert adapter.kind == form
        ours = logits_of(model, adapter)
        assert_same_logits(ours, expected[kind], tokens_of(model))
        again = to_peft(adapter, config)
        assert again.settings.items() >= {"peft_type": kind}.items()
        np.testing.assert_array_equal(
            again.tensors["prompt_embeddings"], folder.tensors["prompt_embeddings"]
        )
