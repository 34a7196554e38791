import gzip
from pathlib import Path

import ml_dtypes
import msgpack
import numpy as np
import pytest
from flax import serialization

from prompt_tuning.checkpoints.formats.t5x_checkpoint import find_checkpoint, open_t5x
from prompt_tuning.core.errors import InputError
from tests.support.shared_data import SHARED
from tests.support.t5x_fixtures import MSGPACK, ZARR


def write_msgpack(path: Path, target: dict) -> Path:
    tree = {"version": 3, "optimizer": {"state": {"step": 1}, "target": target}}
    path.write_bytes(serialization.msgpack_serialize(tree))
    return path


def test_inline_arrays_equal_flaxs():
    tree = serialization.msgpack_restore(MSGPACK.read_bytes())["optimizer"]["target"]
    stored = open_t5x(MSGPACK)
    for name, tensor in stored.items():
        array = tree
        for part in name.split("/"):
            array = array[part]
        np.testing.assert_array_equal(tensor.read(), array)


@pytest.mark.released
def test_the_embedding_equals_the_published_one():
    golden = np.load(SHARED / "data/prompts/tiny_embeddings_32128x4.npy")
    stored = open_t5x(SHARED / "data/models/t5x_tiny_zarr")
    np.testing.assert_array_equal(stored["token_embedder/embedding"].read(), golden)


def test_the_ragged_last_chunk_is_clipped():
    folder = ZARR / "checkpoint_3/target.decoder.logits_dense.kernel"
    read = open_t5x(ZARR)["decoder/logits_dense/kernel"].read()
    last = np.frombuffer(gzip.decompress((folder / "0.2").read_bytes()), "<f4")
    assert read.shape == (8, 100)
    np.testing.assert_array_equal(read[:, 96:], last.reshape(8, 48)[:, :4])


def test_a_checkpoint_is_opened_by_each_of_its_paths():
    expected = ZARR / "checkpoint_3/checkpoint"
    for path in (ZARR, ZARR / "checkpoint_3", expected):
        assert find_checkpoint(path) == expected


def test_the_latest_step_is_the_largest_number(tmp_path):
    for step in (9, 10):
        (tmp_path / f"checkpoint_{step}").mkdir()
        target = {"x": np.full(2, step, np.float32)}
        write_msgpack(tmp_path / f"checkpoint_{step}/checkpoint", target)
    assert open_t5x(tmp_path)["x"].read()[0] == 10


def test_chunks_of_flax_are_joined(tmp_path, monkeypatch):
    array = np.arange(35, dtype=np.float32).reshape(5, 7)
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 32)
    file = write_msgpack(tmp_path / "checkpoint", {"a": {"b": array}})
    assert b"__msgpack_chunked_array__" in file.read_bytes()
    np.testing.assert_array_equal(open_t5x(file)["a/b"].read(), array)


def test_scalars_and_bfloat16_are_read(tmp_path):
    target = {
        "scalar": np.float32(2.5),
        "half": np.arange(3).astype(ml_dtypes.bfloat16),
        "zero_dimensional": np.array(3.0),
    }
    stored = open_t5x(write_msgpack(tmp_path / "checkpoint", target))
    for name, array in target.items():
        np.testing.assert_array_equal(stored[name].read(), array)
        assert stored[name].dtype == array.dtype


@pytest.mark.parametrize("size", [0, 1, 100, 5_000, -1])
def test_a_truncated_msgpack_file_is_refused(size, tmp_path):
    file = tmp_path / "checkpoint"
    file.write_bytes(MSGPACK.read_bytes()[:size])
    with pytest.raises(InputError, match=f"{file} .*{file.stat().st_size:,} bytes"):
        open_t5x(tmp_path)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ({}, "no optimizer/target"),
        ({"x": "PLACEHOLDER://x"}, "Orbax"),
        ({"x": {"driver": "n5", "kvstore": {"path": "x"}}}, "driver 'n5'"),
        ({"x": {"driver": "zarr", "kvstore": {"path": "../x"}}}, "out of the folder"),
        (
            {"x": {"driver": "zarr", "kvstore": {"path": "x/"}}},
            r"x/\.zarray is missing",
        ),
        ({"x": {"__msgpack_chunked_array__": True, "shape": {}}}, "complete chunks"),
    ],
)
def test_folders_that_are_not_native_checkpoints_are_refused(
    target, expected, tmp_path
):
    write_msgpack(tmp_path / "checkpoint", target)
    with pytest.raises(InputError, match=expected):
        open_t5x(tmp_path)


def test_folders_without_a_checkpoint_are_named(tmp_path):
    with pytest.raises(InputError, match="nowhere is missing"):
        open_t5x(tmp_path / "nowhere")
    with pytest.raises(InputError, match="only nothing"):
        open_t5x(tmp_path)
    (tmp_path / "checkpoint_5").mkdir()
    with pytest.raises(InputError, match="checkpoint_5/checkpoint is missing"):
        open_t5x(tmp_path)
    (tmp_path / "checkpoint").write_text("{}")
    with pytest.raises(InputError, match="not a"):
        open_t5x(tmp_path)


def array(shape, dtype, data):
    """Packs an array as Flax does, with any shape and dtype."""
    return msgpack.ExtType(1, msgpack.packb((shape, dtype, data)))


@pytest.mark.parametrize(
    "leaf",
    [
        array([10**12], "float32", bytes(8)),
        array([2**62, 4], "float32", b""),
        array([-1, -2], "float32", bytes(8)),
        array([-2], "float32", bytes(8)),
        array([2.0], "float32", bytes(8)),
        array("2", "float32", bytes(8)),
        array([1] * 70, "float32", bytes(4)),
        array([0, 2**62, 2**62], "float32", b""),
        array([2], "O", bytes(16)),
        array([2], "V0", b""),
        array([2], "U4", bytes(32)),
        array([2], "(1000000000,)f4", bytes(8)),
        array([2], "f4,f4", bytes(16)),
        array([2], ["f4"], bytes(8)),
        array([2], "float32", [1, 2]),
        array([2], "float32", "ab"),
        msgpack.ExtType(1, b"\xff"),
        msgpack.ExtType(9, bytes(8)),
        {"driver": "zarr", "kvstore": "x"},
        {"driver": "zarr", "kvstore": {"path": 7}},
        {"driver": "zarr", "kvstore": {"path": "/etc"}},
        {"driver": "zarr", "kvstore": {"path": "a/../../x"}},
        {"driver": "zarr", "kvstore": {"path": "link"}},
        {"driver": "zarr", "kvstore": {"path": "a\0"}},
        {"driver": "zarr", "kvstore": {"path": "a" * 300}},
        {"driver": ["zarr"], "kvstore": {"path": "a"}},
        {"__msgpack_chunked_array__": True, "shape": 7, "chunks": {}},
        {"__msgpack_chunked_array__": True, "shape": {"0": -1}, "chunks": {}},
        {"__msgpack_chunked_array__": True, "shape": {"0": 2}, "chunks": {"0": 7}},
        {
            "__msgpack_chunked_array__": True,
            "shape": {"0": 4},
            "chunks": {
                "0": array([2], "float32", bytes(8)),
                "1": array([2], "int8", bytes(2)),
            },
        },
        None,
        7,
        [],
    ],
    ids=lambda leaf: repr(leaf)[:60],
)
def test_contradictory_leaves_are_refused(leaf, tmp_path):
    folder = tmp_path / "checkpoint_1"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    (tmp_path / ".zarray").write_text("{}")
    tree = {"optimizer": {"target": {"a": leaf}}}
    (folder / "checkpoint").write_bytes(msgpack.packb(tree))
    with pytest.raises(InputError, match=r"a in .*checkpoint"):
        open_t5x(folder)


def test_an_empty_array_at_the_end_is_read(tmp_path):
    tree = {"optimizer": {"target": {"a": array([0, 3], "float32", b"")}}}
    (tmp_path / "checkpoint").write_bytes(msgpack.packb(tree))
    assert open_t5x(tmp_path)["a"].read().shape == (0, 3)
