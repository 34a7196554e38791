"""Rewritten states of checkpoints with correct checksums."""

import json
import shutil

import numpy as np
import pytest

from prompt_tuning.checkpoints.run_store import checkpoint_files
from prompt_tuning.checkpoints.run_store.checkpoint_selection import best_or_latest
from prompt_tuning.checkpoints.run_store.checkpoint_state import measured, sealed
from prompt_tuning.checkpoints.run_store.checkpoint_store import CheckpointStore
from prompt_tuning.core.errors import InputError

LEAF = "encoder/prompt/prompt"
FILE = "encoder.prompt.prompt.npy"
ARRAY = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def checkpoint(tmp_path):
    store = CheckpointStore(tmp_path / "run", keep_best=("loss", "min"))
    moments = {"mu": ARRAY}
    return store.save(3, {LEAF: ARRAY}, moments, {"a": 1}, metrics={"loss": 1.0})


def rewrite(checkpoint, change):
    file = checkpoint / "state.json"
    state = json.loads(file.read_text())
    del state["checksum"]
    change(state)
    file.write_text(sealed(state))


def read(checkpoint):
    state = checkpoint_files.verify(checkpoint)
    return checkpoint_files.read_trained(checkpoint, state)


def test_a_rewritten_state_is_read(checkpoint):
    rewrite(checkpoint, lambda state: state.update(extra={"b": [1]}))
    np.testing.assert_array_equal(read(checkpoint)[LEAF], ARRAY)


@pytest.mark.parametrize("where", ["trained", "files"])
@pytest.mark.parametrize("kind", ["parent", "absolute", "link", "long", "zero"])
def test_files_outside_the_checkpoint_are_not_read(where, kind, checkpoint, tmp_path):
    secret = tmp_path / "secret.npy"
    np.save(secret, ARRAY)
    name = {
        "parent": "../../../secret.npy",
        "absolute": str(secret),
        "link": "link.npy",
        "long": "a" * 300,
        "zero": "a\0",
    }[kind]
    (checkpoint / "link.npy").symlink_to(secret)

    def change(state):
        if where == "trained":
            state["trained"][LEAF]["file"] = name
        else:
            state["files"][name] = measured(secret)

    rewrite(checkpoint, change)
    with pytest.raises(InputError, match=r"state\.json names the file"):
        read(checkpoint)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", "3"),
        ("step", -1),
        ("step", 2.5),
        ("metrics", []),
        ("metrics", {"loss": "low"}),
        ("metrics", {"loss": None}),
        ("extra", 7),
        ("keep_best", "loss"),
        ("keep_best", ["loss"]),
        ("keep_best", ["loss", "least"]),
        ("keep_best", [["loss"], "min"]),
        ("trained", [LEAF]),
        ("trained", {LEAF: FILE}),
        ("trained", {LEAF: {"file": FILE}}),
        ("trained", {LEAF: {"shape": [2, 3]}}),
        ("trained", {LEAF: {"file": [FILE], "shape": [2, 3]}}),
        ("trained", {LEAF: {"file": FILE, "shape": "23"}}),
        ("trained", {LEAF: {"file": FILE, "shape": [2.0, 3.0]}}),
        ("trained", {LEAF: {"file": FILE, "shape": [-2, -3]}}),
        ("files", [FILE]),
        ("files", {FILE: 152}),
        ("files", {FILE: {"bytes": "152", "sha256": "0"}}),
        ("files", {FILE: {"bytes": 152}}),
        ("format", [1]),
    ],
)
def test_fields_with_another_type_are_refused(field, value, checkpoint):
    rewrite(checkpoint, lambda state: state.update({field: value}))
    with pytest.raises(InputError, match=rf"{field}.*state\.json|json .*{field}"):
        read(checkpoint)


@pytest.mark.parametrize(
    "field", ["step", "metrics", "extra", "trained", "files", "format"]
)
def test_missing_fields_are_named(field, checkpoint):
    rewrite(checkpoint, lambda state: state.pop(field))
    with pytest.raises(InputError, match=rf"state\.json.*{field}"):
        read(checkpoint)


@pytest.mark.parametrize(
    "content", ["[]", "null", "7", "[" * 100_000, '{"checksum": NaN, "a": NaN}', "\xff"]
)
def test_other_json_is_refused(content, checkpoint):
    (checkpoint / "state.json").write_text(content)
    with pytest.raises(InputError, match=r"state\.json"):
        read(checkpoint)
    shutil.rmtree(checkpoint)
    with pytest.raises(InputError, match="is missing"):
        read(checkpoint)


def test_a_damaged_state_is_skipped_for_an_older_one(tmp_path, checkpoint):
    store = CheckpointStore(tmp_path / "run")
    store.save(4, {LEAF: ARRAY}, {"mu": ARRAY}, {})
    rewrite(store.folder / "checkpoint_4", lambda state: state.update(trained=7))
    messages = []
    assert store.latest_valid(messages.append) == 3
    assert "trained" in messages[0]


def test_a_state_without_a_selection_selects_the_newest(checkpoint):
    rewrite(checkpoint, lambda state: state.pop("keep_best"))
    assert best_or_latest(checkpoint.parent) == checkpoint
