"""Reading and writing adapters in every file format."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from prompt_tuning.adapters.adapter import Adapter
from prompt_tuning.adapters.peft.folder import write_folder
from prompt_tuning.adapters.peft.peft_conversion import to_peft
from prompt_tuning.adapters.prefix_files import read_prefix_file
from prompt_tuning.adapters.prompt_files import read_prompt
from prompt_tuning.checkpoints.run_store.checkpoint_store import CheckpointStore
from prompt_tuning.core.errors import InputError
from prompt_tuning.prompts.adapter_files import (
    read_adapter,
    write_array,
    write_checkpoint,
    write_t5x,
)
from prompt_tuning.prompts.adapter_kinds import find_kind
from prompt_tuning.prompts.deep import ADDED_DEEP
from tests.support.adapters import random_adapter
from tests.support.dummies import LLAMA, T5_GATED
from tests.support.shared_data import SHARED

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)
ENCODER, DECODER = "encoder/prompt/prompt", "decoder/prompt/prompt"
KINDS = ("PROMPT_TUNING", "PREFIX_TUNING", "MULTITASK_PROMPT_TUNING", "LORA", "IA3")


def prompt(path=DECODER, array=ROWS):
    return Adapter(kind="PROMPT_TUNING", parameters={path: array})


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(actual[path], array)


# For a T5's tasks PEFT stores rows that both stacks share, so the factors differ.
@pytest.mark.parametrize(
    ("config", "kind"),
    [(LLAMA, kind) for kind in KINDS]
    + [(T5_GATED, kind) for kind in KINDS if not kind.startswith("MULTI")],
)
def test_a_peft_folder_and_a_checkpoint_have_the_same_content(kind, config, tmp_path):
    adapter = random_adapter(config, kind)
    write_folder(tmp_path / "peft", to_peft(adapter, config))
    checkpoint = write_checkpoint(tmp_path / "run", adapter, "somewhere")
    for path in (tmp_path / "peft", tmp_path / "run", checkpoint):
        converted = read_adapter(path, config)
        assert converted.kind == kind
        assert converted.scalings == pytest.approx(adapter.scalings)
        assert_same(converted.parameters, adapter.parameters)
        assert_same(read_adapter(path, config).parameters, adapter.parameters)
    state = json.loads((checkpoint / "state.json").read_text())
    assert state["step"] == 0 and state["extra"]["source"] == "somewhere"


def test_leaves_without_a_folded_form_are_not_an_adapter(tmp_path):
    trained = {"decoder/prompt/inner/prompt": ROWS, "decoder/prompt/bias": ROWS[0]}
    CheckpointStore(tmp_path).save(3, trained, (), {})
    with pytest.raises(InputError, match="not one adapter of a kind"):
        read_adapter(tmp_path, None)


@pytest.mark.parametrize("suffix", [".npy", ".safetensors", ""])
def test_a_single_array_belongs_to_the_models_only_prompt(suffix, tmp_path):
    file = tmp_path / f"mine{suffix}"
    write_array(file, prompt())
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    for config, path in ((LLAMA, DECODER), (T5_GATED, ENCODER), (None, DECODER)):
        assert_same(read_adapter(file, config).parameters, {path: ROWS})


def test_a_prompt_may_be_a_batch_of_one(tmp_path):
    """`[1, P, D]`; in a model of one layer that is a deep prompt."""
    prompt = np.ones((1, 3, 8), np.float32)
    np.save(tmp_path / "a.npy", prompt)
    adapter = read_adapter(tmp_path / "a.npy", LLAMA)
    np.testing.assert_array_equal(
        adapter.parameters["decoder/prompt/prompt"], prompt[0]
    )
    one = dataclasses.replace(LLAMA, layers=1)
    deep = read_adapter(tmp_path / "a.npy", one)
    assert deep.parameters["decoder/prompt/prompt"].shape == (1, 3, 8)
    assert read_prompt(tmp_path / "a.npy").shape == (3, 8)


def test_the_name_of_a_single_array_decides_first(tmp_path):
    for name in ("decoder.prompt.prompt.prompt", "decoder.prompt.prompt.npy"):
        with (tmp_path / name).open("wb") as file:
            np.save(file, ROWS)
        array = read_adapter(tmp_path / name, T5_GATED).parameters
        assert_same(array, {DECODER: ROWS})


def test_a_prefix_is_identified_by_its_axes(tmp_path):
    adapter = random_adapter(LLAMA, "PREFIX_TUNING")
    write_array(tmp_path / "prefix.npy", adapter)
    converted = read_adapter(tmp_path / "prefix.npy", None)
    assert converted.kind == "PREFIX_TUNING"
    assert_same(converted.parameters, adapter.parameters)


def test_a_prefix_in_int8_is_rounded_by_head_and_slot(tmp_path):
    adapter, file = random_adapter(LLAMA, "PREFIX_TUNING"), tmp_path / "a.safetensors"
    ((path, prefix),) = adapter.parameters.items()
    stack = (len(prefix), *prefix.shape[3:])
    prefix *= np.geomspace(1e-3, 1e3, prefix.shape[2])[:, None, None]
    prefix[0, 0, 0, 0] = 0
    write_array(file, adapter, int8=True)
    assert file.stat().st_size < prefix.nbytes * (1 + 4 / prefix.shape[4]) / 4 + 300
    restored = read_adapter(file, None).parameters[path]
    step = np.abs(prefix).max(axis=-1, keepdims=True) / 127
    assert restored.dtype == np.float32
    assert (np.abs(restored - prefix) <= step / 2 * (1 + 1e-5)).all()
    np.testing.assert_array_equal(read_prefix_file(file, stack), restored)
    with pytest.raises(InputError, match="int8 is a form of key/value prefixes"):
        write_array(tmp_path / "b.safetensors", prompt(), int8=True)
    tensors = load_file(file)
    for damage in (
        {"prefix_scales": tensors["prefix_scales"][..., :1]},
        {"prefix_codes": tensors["prefix_codes"].astype(np.int16)},
        {"prefix_scales": tensors["prefix_scales"] * np.nan},
    ):
        save_file(tensors | damage, file)
        with pytest.raises(InputError, match=r"expected int8|not finite"):
            read_adapter(file, None)


def test_exports_for_servers_have_one_tensor_of_rows(tmp_path):
    write_array(tmp_path / "prompt.safetensors", prompt(array=ROWS.T))
    (tensor,) = load_file(tmp_path / "prompt.safetensors").values()
    np.testing.assert_array_equal(tensor, ROWS.T)
    assert tensor.dtype == np.float32


def test_t5x_names_have_one_more_module(tmp_path):
    both = Adapter(kind="PROMPT_TUNING", parameters={ENCODER: ROWS, DECODER: ROWS + 1})
    files = write_t5x(tmp_path / "t5x", both)
    assert [file.name for file in files] == [
        "encoder.prompt.prompt.prompt",
        "decoder.prompt.prompt.prompt",
    ]
    with files[0].open("rb") as file:
        np.testing.assert_array_equal(np.load(file, allow_pickle=False), ROWS)
    assert_same(read_adapter(tmp_path / "t5x", None).parameters, both.parameters)
    with pytest.raises(InputError, match="no names for an adapter of kind LORA"):
        write_t5x(tmp_path / "lora", random_adapter(LLAMA, "LORA"))


@pytest.mark.released
def test_a_released_prompt(tmp_path):
    source = SHARED / "data/prompts/released/rte.npy"
    target = tmp_path / "encoder.prompt.prompt.prompt"
    target.write_bytes(source.read_bytes())
    array = read_adapter(tmp_path, T5_GATED).parameters
    assert_same(array, {ENCODER: np.load(source).astype(np.float32)})
    assert array[ENCODER].shape == (100, 768)


def test_nothing_is_overwritten_without_force(tmp_path):
    write_array(tmp_path / "prompt.npy", prompt())
    with pytest.raises(InputError, match="already exists; --force"):
        write_array(tmp_path / "prompt.npy", prompt(array=-ROWS))
    write_array(tmp_path / "prompt.npy", prompt(array=-ROWS), force=True)
    assert_same(
        read_adapter(tmp_path / "prompt.npy", None).parameters, {DECODER: -ROWS}
    )
    with pytest.raises(InputError, match=r"contains prompt\.npy, which would be lost"):
        write_checkpoint(tmp_path, prompt(), "")
    write_checkpoint(tmp_path / "run", prompt(), "")
    with pytest.raises(InputError, match="which would be lost"):
        write_checkpoint(tmp_path / "run", prompt(), "")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (ROWS[0], r"shape \(3,\), expected .* of PROMPT_TUNING \[P, D\]"),
        (ROWS.astype(int), "int64, expected floating"),
        (np.full((2, 2), np.nan), "not finite"),
        (ROWS[:0], r"shape \(0, 3\)"),
    ],
)
def test_arrays_that_are_not_an_adapter_are_refused(array, message, tmp_path):
    np.save(tmp_path / "prompt.npy", array)
    with pytest.raises(InputError, match=message):
        read_adapter(tmp_path / "prompt.npy", None)


def test_a_missing_path(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        read_adapter(tmp_path / "none", None)
    with pytest.raises(InputError, match=r"contain an adapter: expected PEFT's files"):
        read_adapter(tmp_path, None)
    write_folder(tmp_path / "peft", to_peft(prompt(), None))
    with pytest.raises(InputError, match="set the model that it is for"):
        read_adapter(tmp_path / "peft", None)


def test_kinds_are_identified_by_names_and_axes():
    deep = {DECODER: np.zeros((2, 4, 3), np.float32)}
    assert find_kind(deep, "here") == "DEEP_PROMPT"
    lora = random_adapter(LLAMA, "LORA").parameters
    assert find_kind(lora, "here") == "LORA"
    with pytest.raises(InputError, match=r"here contains .*not one adapter"):
        find_kind(lora | deep, "here")
    several = dataclasses.replace(prompt(), parameters={ENCODER: ROWS, DECODER: ROWS})
    with pytest.raises(InputError, match="has 2 arrays"):
        write_array(Path("nowhere"), several)


def test_added_and_replacing_deep_prompts_are_distinguished(tmp_path):
    start = "encoder/prompt"
    leaves = {f"{start}/prompt": ROWS, f"{start}/added": np.stack([ROWS, -ROWS])}
    assert find_kind(leaves, "here") == ADDED_DEEP
    write_checkpoint(tmp_path / "it", Adapter(kind=ADDED_DEEP, parameters=leaves), "")
    back = read_adapter(tmp_path / "it", T5_GATED)
    assert back.kind == ADDED_DEEP
    assert_same(back.parameters, leaves)


def test_the_file_name_identifies_a_lone_prefix_of_an_encoder(tmp_path):
    table = np.ones((2, 2, 3, 4, 3), np.float32)
    path = "encoder/prompt/prompt"
    adapter = Adapter(kind="PREFIX_TUNING", parameters={path: table})
    with pytest.raises(InputError, match=r"name the file encoder\.prompt\.prompt\.npy"):
        write_array(tmp_path / "mine.npy", adapter)
    assert not list(tmp_path.iterdir())
    write_array(tmp_path / "encoder.prompt.prompt.npy", adapter)
    back = read_adapter(tmp_path / "encoder.prompt.prompt.npy", T5_GATED)
    assert_same(back.parameters, {path: table})
