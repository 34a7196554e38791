"""The two files of a PEFT adapter, compared with files written by PEFT 0.21.2."""

import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from prompt_tuning.adapters.peft.folder import (
    AdapterFolder,
    find_folder,
    read_folder,
    write_folder,
)
from prompt_tuning.core import atomic_files
from prompt_tuning.core.errors import InputError
from tests.support.shared_data import FIXTURES

# torch is only in the `bench` extra.
# pyright: reportMissingImports=false

PEFT = FIXTURES / "peft"
FOLDERS = sorted(path.parent for path in PEFT.glob("*/*/adapter_config.json"))
FILES = ("adapter_config.json", "adapter_model.safetensors")
ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)
SETTINGS = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 4, "of_tomorrow": [1]}
PREFIX = {
    "peft_type": "PREFIX_TUNING",
    "num_virtual_tokens": 4,
    "num_layers": 1,
    "token_dim": 2,
    "num_attention_heads": 1,
}
TASKS = SETTINGS | {
    "peft_type": "MULTITASK_PROMPT_TUNING",
    "num_tasks": 2,
    "num_ranks": 1,
}
LORA = {"peft_type": "LORA", "r": 2, "rank_pattern": {"b": 3}}
A, B = (f"base_model.model.a.lora_{x}.weight" for x in "AB")


def write_adapter(folder, rows=ROWS, **settings):
    write_folder(
        folder, AdapterFolder(SETTINGS | settings, {"prompt_embeddings": rows})
    )
    return folder


def test_there_are_adapters_of_six_kinds():
    kinds = {json.loads((f / FILES[0]).read_text())["peft_type"] for f in FOLDERS}
    assert len(kinds) == 6 and len(FOLDERS) == 22


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f"{f.parent.name}/{f.name}")
def test_pefts_files_survive_a_round_trip_byte_for_byte(folder, tmp_path):
    write_folder(tmp_path / "again", read_folder(folder))
    assert {path.name for path in (tmp_path / "again").iterdir()} == set(FILES)
    for name in FILES:
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_unknown_settings_are_kept(tmp_path):
    folder = read_folder(write_adapter(tmp_path / "adapter"))
    assert folder.kind == "PROMPT_TUNING"
    assert folder.settings == SETTINGS
    np.testing.assert_array_equal(folder.tensors["prompt_embeddings"], ROWS)


def test_tensors_are_written_in_the_order_of_their_axes(tmp_path):
    write_adapter(tmp_path / "adapter", ROWS.reshape(3, 4).T)
    stored = load_file(tmp_path / "adapter" / FILES[1])["prompt_embeddings"]
    np.testing.assert_array_equal(stored, ROWS.reshape(3, 4).T)


def test_a_bfloat16_adapter_is_read_as_float32(tmp_path):
    folder = write_adapter(tmp_path / "adapter")
    half = {"prompt_embeddings": ROWS.astype(ml_dtypes.bfloat16)}
    save_file(half, folder / FILES[1])
    actual = read_folder(folder).tensors["prompt_embeddings"]
    assert actual.dtype == np.float32
    np.testing.assert_array_equal(actual, ROWS)


def test_a_named_adapter_is_in_a_subfolder(tmp_path):
    write_adapter(tmp_path / "saved" / "mine")
    assert find_folder(tmp_path / "saved") == tmp_path / "saved" / "mine"
    assert read_folder(tmp_path / "saved").settings == SETTINGS
    write_adapter(tmp_path / "saved" / "yours")
    with pytest.raises(InputError, match=r"several adapters.*mine.*yours"):
        read_folder(tmp_path / "saved")


def test_a_missing_path(tmp_path):
    assert find_folder(tmp_path) is None
    assert find_folder(tmp_path / "none") is None
    with pytest.raises(InputError, match=r"has no adapter_config\.json"):
        read_folder(tmp_path)


@pytest.mark.torch
def test_tensors_in_a_file_of_torch_are_read_as_others(tmp_path):
    import torch

    folder = write_adapter(tmp_path / "adapter")
    expected = read_folder(folder).tensors
    (folder / FILES[1]).unlink()
    tensors = {name: torch.tensor(x) for name, x in expected.items()}
    torch.save(tensors, folder / "adapter_model.bin")
    found = read_folder(folder).tensors
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def test_a_file_that_torch_did_not_write_is_refused_with_a_command(tmp_path):
    folder = write_adapter(tmp_path / "adapter")
    (folder / FILES[1]).rename(folder / "adapter_model.bin")
    with pytest.raises(InputError, match=r"not an archive of tensors.*s\.save_file"):
        read_folder(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "is not valid JSON"), ("[]", "no 'peft_type'"), ("{}", "no 'peft_type'")],
)
def test_damaged_settings_are_refused(content, message, tmp_path):
    folder = write_adapter(tmp_path / "adapter")
    (folder / FILES[0]).write_text(content)
    with pytest.raises(InputError, match=message):
        read_folder(folder)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (ROWS.astype(np.int32), "int32, expected floating"),
        (np.where(ROWS == 5, np.inf, ROWS), "not finite"),
    ],
)
def test_numbers_that_cannot_be_parameters_are_refused(array, message, tmp_path):
    folder = write_adapter(tmp_path / "adapter")
    save_file({"prompt_embeddings": array}, folder / FILES[1])
    with pytest.raises(InputError, match=message):
        read_folder(folder)


SHAPES = {
    "rows": (SETTINGS, {"prompt_embeddings": ROWS[:3]}, "expected 4 rows"),
    "axes": (SETTINGS, {"prompt_embeddings": ROWS[0]}, "expected 2 axes"),
    "name": (SETTINGS, {"prompt": ROWS}, "expected 'prompt_embeddings'"),
    "length": (SETTINGS | {"num_virtual_tokens": 0}, {"prompt_embeddings": ROWS}, "0,"),
    "width": (SETTINGS | {"token_dim": 4}, {"prompt_embeddings": ROWS}, "token_dim is"),
    "stacks": (
        SETTINGS | {"num_transformer_submodules": 3},
        {"prompt_embeddings": ROWS},
        "expected 1 or 2",
    ),
    "prefix": (PREFIX, {"prompt_embeddings": ROWS}, r"expected \(4, 4\)"),
    "heads": (
        PREFIX | {"num_attention_heads": 3},
        {"prompt_embeddings": ROWS},
        "its 3",
    ),
    "columns": (
        TASKS,
        {"prompt_embeddings": ROWS, "prefix_task_cols": ROWS.reshape(1, 4, 3)},
        r"prefix_task_cols has shape \(1, 4, 3\), expected \(2, 4, 1\)",
    ),
    "rank": (LORA, {A: ROWS[:3], B: ROWS[:, :2]}, "lora_A.*expected rank 2"),
    "pattern": (
        LORA,
        {A.replace(".a.", ".x.b."): ROWS, B.replace(".a.", ".x.b."): ROWS},
        "lora_A.*expected rank 3",
    ),
    "half": (LORA, {A: ROWS[:2]}, "not its lora_B"),
    "no regex": (LORA | {"rank_pattern": {"(": 1}}, {A: ROWS[:2]}, "not a regular"),
    "scale": (
        {"peft_type": "IA3"},
        {"base_model.model.a.ia3_l": ROWS},
        r"expected \[out, 1\] or",
    ),
}


@pytest.mark.parametrize(
    ("settings", "tensors", "message"), SHAPES.values(), ids=SHAPES
)
def test_shapes_that_contradict_the_settings_are_refused(
    settings, tensors, message, tmp_path
):
    folder = tmp_path / "adapter"
    with pytest.raises(InputError, match=message):
        write_folder(folder, AdapterFolder(settings, tensors))
    assert not list(tmp_path.iterdir())
    folder.mkdir()
    (folder / FILES[0]).write_text(json.dumps(settings))
    save_file(
        {n: np.ascontiguousarray(x) for n, x in tensors.items()}, folder / FILES[1]
    )
    with pytest.raises(InputError, match=message):
        read_folder(folder)


def test_only_float32_is_written(tmp_path):
    with pytest.raises(InputError, match="float64, expected float32"):
        write_adapter(tmp_path / "adapter", ROWS.astype(float))
    assert not list(tmp_path.iterdir())


def test_an_adapter_is_replaced_only_by_force(tmp_path):
    folder = write_adapter(tmp_path / "adapter")
    (folder / "README.md").write_text("card")
    again = AdapterFolder(SETTINGS, {"prompt_embeddings": -ROWS})
    with pytest.raises(InputError, match=r"already; --force replaces them"):
        write_folder(folder, again)
    write_folder(folder, again, force=True)
    content = read_folder(folder)
    np.testing.assert_array_equal(content.tensors["prompt_embeddings"], -ROWS)
    assert (folder / "README.md").read_text() == "card"
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("stranger", ["model.safetensors", "mine.txt"])
def test_a_folder_with_other_files_is_never_replaced(stranger, tmp_path):
    folder = write_adapter(tmp_path / "adapter")
    (folder / stranger).touch()
    with pytest.raises(InputError, match=f"contains {stranger}, which would be lost"):
        write_folder(folder, AdapterFolder(SETTINGS, {"prompt_embeddings": -ROWS}))
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is not a folder"):
        write_adapter(tmp_path / "file")


def test_a_killed_write_leaves_the_old_adapter(tmp_path, monkeypatch):
    folder = write_adapter(tmp_path / "adapter")

    class KilledError(BaseException):
        pass

    def kill(*_):
        raise KilledError

    again = AdapterFolder(SETTINGS, {"prompt_embeddings": -ROWS})
    renames = Path.rename
    for name in ("fsync", "exchange", "rename"):
        with monkeypatch.context() as patch:
            if name == "fsync":
                patch.setattr(os, "fsync", kill)
            elif name == "exchange":
                patch.setattr(atomic_files, "exchange", kill)
            else:
                # Without an exchange: the second rename, after the first moved it away.
                patch.setattr(atomic_files, "exchange", lambda *_: False)
                patch.setattr(
                    Path,
                    "rename",
                    lambda path, to: (
                        kill() if path.name == "new" else renames(path, to)
                    ),
                )
            with pytest.raises(KilledError):
                write_folder(folder, again, force=True)
        stored = read_folder(folder).tensors["prompt_embeddings"]
        np.testing.assert_array_equal(stored, ROWS)
        assert list(tmp_path.iterdir()) == [folder]
