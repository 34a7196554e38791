"""Names and tensors of adapters as other programs and versions save them."""

import dataclasses
import functools

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from prompt_tuning.adapters.peft.folder import AdapterFolder, read_folder, write_folder
from prompt_tuning.adapters.peft.peft_conversion import from_peft
from prompt_tuning.adapters.prompt_files import read_prompt
from prompt_tuning.core.errors import InputError
from prompt_tuning.families.hf_folder import read_config
from prompt_tuning.pretrained.source import read_frozen
from prompt_tuning.settings.pretrained import Pretrained
from prompt_tuning.training.transfer import read_source
from prompt_tuning.tuned.adapter_conversion import open_source
from tests.adapters.peft_folders.test_peft_projections import (
    QUERIES,
    lora,
    name_of,
    normal,
    q_proj,
)
from tests.support.dummies import LLAMA
from tests.support.shared_data import FIXTURES

PEFT = FIXTURES / "peft"
D = LLAMA.width
PROMPT = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 4}
TASKS = {"peft_type": "MULTITASK_PROMPT_TUNING", "num_virtual_tokens": 4}
TASKS |= {"num_tasks": 2, "num_ranks": 1}


SETTINGS = {
    "LoRA": lora(QUERIES).settings,
    "IA3": {"peft_type": "IA3", "target_modules": ["q_proj"]},
    "prompt": PROMPT,
    "tasks": TASKS,
}


def tensors_of(kind):
    if kind == "LoRA":
        return lora(QUERIES).tensors
    if kind == "IA3":
        return {name_of(q_proj(i), "ia3_l"): normal(D, 1) for i in range(2)}
    tasks = {"prefix_task_cols": normal(2, 4, 1), "prefix_task_rows": normal(2, 1, D)}
    return {"prompt_embeddings": normal(4, D)} | (tasks if kind == "tasks" else {})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("base_model", "module.base_model"),
        ("base_model", "_orig_mod.base_model"),
        ("self_attn", "_orig_mod._fsdp_wrapped_module.self_attn"),
    ],
)
def test_names_of_wrappers_are_left_out(old, new, tmp_path):
    theirs = lora(QUERIES)
    write_folder(tmp_path / "adapter", theirs)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({n.replace(old, new): x for n, x in theirs.tensors.items()}, file)
    assert read_folder(tmp_path / "adapter").tensors.keys() == theirs.tensors.keys()


@pytest.mark.parametrize("value", [None, False, {}, []])
def test_unknown_settings_that_are_off_are_read_without_a_warning(value):
    old = {"enable_lora": True, "merge_weights": True, "of_tomorrow": value}
    from_peft(lora(QUERIES, **old), LLAMA, "here")


def state_dict_name(name, adapter):
    """Returns PEFT's name of a saved tensor in the model's state dict."""
    if name == "prompt_embeddings":
        return f"prompt_encoder.{adapter}.embedding.weight"
    if name.startswith("prefix_"):
        return f"prompt_encoder.{adapter}.{name}"
    for part in ("lora_A", "lora_B", "ia3_l"):
        name = name.replace(part, f"{part}.{adapter}")
    return name


@pytest.mark.parametrize("kind", SETTINGS)
def test_tensors_with_the_adapters_name_are_those_without(kind, tmp_path):
    settings, tensors = SETTINGS[kind], tensors_of(kind)
    write_folder(tmp_path / "a", AdapterFolder(settings, tensors))
    file = tmp_path / "a/adapter_model.safetensors"
    save_file({state_dict_name(n, "my-style"): x for n, x in tensors.items()}, file)
    read = read_folder(tmp_path / "a").tensors
    assert read.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(read[name], array)
    if kind == "prompt":
        expected = tensors["prompt_embeddings"]
        np.testing.assert_array_equal(read_prompt(tmp_path / "a"), expected)
    others = {state_dict_name(n, "other"): x for n, x in tensors.items()}
    save_file(load_file(file) | others, file)
    with pytest.raises(InputError, match=r"several adapters .*'my-style', 'other'"):
        read_folder(tmp_path / "a")


def renamed(folder, old, new):
    tensors = {name.replace(old, new): x for name, x in folder.tensors.items()}
    return AdapterFolder(folder.settings, tensors)


@pytest.mark.parametrize("family", ["gemma3", "gemma3_text"])
@pytest.mark.parametrize(
    "prefix",
    ["model.language_model.", "language_model.model.", "language_model.", "model."],
)
def test_gemma_3_has_one_text_model_by_several_names(family, prefix):
    theirs = lora(QUERIES, target_modules=["q_proj"])
    config = dataclasses.replace(LLAMA, family=family, query_key_norm="head")
    config = dataclasses.replace(config, norm_placement="around")
    adapter = from_peft(renamed(theirs, "model.layers", f"{prefix}layers"), config, "")
    expected = from_peft(theirs, LLAMA, "here").parameters
    assert adapter.parameters.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(adapter.parameters[path], array)
    if prefix != "model.":
        with pytest.raises(InputError, match=r"language_model.* not a projection"):
            from_peft(renamed(theirs, "model.layers", f"{prefix}layers"), LLAMA, "")


def test_adapters_of_the_image_encoder_are_left_out_with_a_warning():
    config = dataclasses.replace(LLAMA, family="gemma3")
    images = "vision_tower.encoder.layers.0.self_attn.q_proj"
    theirs = lora(QUERIES | {f"model.{images}": (5, 5)}, target_modules=["q_proj"])
    with pytest.warns(UserWarning, match=r"adapts 1 modules that texts .*model\.visi"):
        adapter = from_peft(theirs, config, "here")
    assert len(adapter.parameters) == 2
    with pytest.raises(InputError, match="only modules that texts do not pass"):
        from_peft(lora({images: (5, 5)}), config, "here")


COPIED = {
    "untied": ("llama_gqa_untied", "model.embed_tokens", "lm_head"),
    "tied": ("gpt2_tied", "transformer.wte", "lm_head"),
    "encoder-decoder": ("t5v11_untied_gated", "shared", "lm_head"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "prompt_tuning"])
@pytest.mark.parametrize("case", COPIED)
def test_copies_of_the_frozen_tables_are_read_if_they_are_equal(case, kind, tmp_path):
    model, embedding, head = COPIED[case]
    base, source = PEFT / model / "base", PEFT / model / kind
    stored = load_file(base / "model.safetensors")
    table = stored[f"{embedding}.weight"]
    prefix = "base_model.model." if kind == "lora" else "base_model."
    copies = {f"{prefix}{embedding}.weight": table}
    copies[f"{prefix}{head}.weight"] = stored.get(f"{head}.weight", table.copy())
    given = read_folder(source)
    settings, tensors = given.settings, given.tensors
    write_folder(tmp_path / "a", AdapterFolder(settings, tensors | copies))

    config = read_config(base)
    frozen = Pretrained(checkpoint=str(base))
    expected = from_peft(given, config, "here").parameters
    for read in (
        read_source(tmp_path / "a", config, frozen).leaves,
        open_source(tmp_path / "a", str(base)).adapters[0].parameters,
    ):
        assert read.keys() == expected.keys()
        for path, array in expected.items():
            np.testing.assert_array_equal(np.asarray(read[path]), array)

    def refused(name, tensor, message, reader):
        theirs = AdapterFolder(settings, tensors | copies | {name: tensor})
        with pytest.raises(InputError, match=message):
            from_peft(theirs, config, "here", reader)

    reader = functools.partial(read_frozen, frozen)
    name, moved = f"{prefix}{head}.weight", copies[f"{prefix}{head}.weight"].copy()
    moved[0, :2] += 1
    refused(name, moved, rf"copy .*{head}.* of which 2 of {moved.size:,} num", reader)
    refused(name, moved[1:], r"has a copy .*vocabulary was resized", reader)
    refused(name, moved, "must be compared", None)


LAYERS = {q_proj(0): (D, D)}
INCOMPLETE = {
    "a list": {"target_modules": ["q_proj"]},
    "no targets": {"target_modules": None},
    "a pattern": {"target_modules": r".*\.[01]\.self_attn\.q_proj"},
    "another projection": {"target_modules": [q_proj(0), q_proj(1), "x"]},
    "layers": {"target_modules": ["q_proj"], "layers_to_transform": [0, 1]},
}
COMPLETE = {
    "one name": {"target_modules": [q_proj(0)]},
    "pattern": {"target_modules": r".*\.0\.self_attn\.q_proj"},
    "excluded": {"target_modules": ["q_proj"], "exclude_modules": [q_proj(1)]},
    "excluded pattern": {
        "target_modules": ["q_proj"],
        "exclude_modules": ".*[.]1[.].*",
    },
    "one layer": {"target_modules": ["q_proj"], "layers_to_transform": 0},
    "its pattern": {
        "target_modules": ["q_proj"],
        "layers_to_transform": [0],
        "layers_pattern": "layers",
    },
}


@pytest.mark.parametrize("settings", INCOMPLETE.values(), ids=INCOMPLETE)
def test_selected_modules_without_tensors_are_named_as_by_peft(settings):
    with pytest.warns(UserWarning, match=r"no tensors of 1 modules .*layers\.1\.self"):
        from_peft(lora(LAYERS, **settings), LLAMA, "here")


@pytest.mark.parametrize("settings", COMPLETE.values(), ids=COMPLETE)
def test_modules_that_are_not_selected_need_no_tensors(settings):
    from_peft(lora(LAYERS, **settings), LLAMA, "here")


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["k_proj"]},
        {"target_modules": ["q_proj"], "layers_to_transform": [1]},
        {"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]},
    ],
)
def test_tensors_that_peft_would_ignore_are_refused(settings):
    with pytest.raises(InputError, match=r"0\.self_attn\.q_proj .*PEFT would ignore"):
        from_peft(lora(LAYERS, **settings), LLAMA, "here")
