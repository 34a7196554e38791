import gzip
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from flax import serialization

from prompt_tuning.checkpoints.formats.zarr import open_zarr
from prompt_tuning.checkpoints.restore_plan import plan_restore
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_config import t5_config
from prompt_tuning.families import t5x
from tests.support.expected_shapes import abstract
from tests.support.shared_data import SHARED, needs_shared

MSGPACK = SHARED / "data/models/t5x_tiny_msgpack/test_t5_tiny.checkpoint_0"
ZARR = SHARED / "data/models/t5x_tiny_zarr"
CONFIGS = {
    MSGPACK: t5_config(width=8, feed_forward_width=16, layers=2, heads=4, head_width=3),
    ZARR: t5_config(
        width=4,
        feed_forward_width=8,
        layers=2,
        heads=2,
        head_width=2,
        relative_buckets=4,
        relative_maximum_distance=8,
    ),
}


def write_msgpack(path: Path, target: dict) -> Path:
    tree = {"version": 3, "optimizer": {"state": {"step": 1}, "target": target}}
    path.write_bytes(serialization.msgpack_serialize(tree))
    return path


def write_zarr(folder: Path, files: dict[str, bytes], **metadata) -> Path:
    folder.mkdir(parents=True)
    defaults = {
        "zarr_format": 2,
        "shape": [5],
        "chunks": [3],
        "dtype": "<f4",
        "compressor": None,
        "fill_value": None,
        "filters": None,
        "order": "C",
    }
    (folder / ".zarray").write_text(json.dumps(defaults | metadata))
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def floats(*numbers: float) -> bytes:
    return np.array(numbers, "<f4").tobytes()


@needs_shared
@pytest.mark.parametrize(("path", "count"), [(MSGPACK, 52), (ZARR, 52)])
def test_every_array_of_a_real_file_is_restored(path, count):
    config, stored = CONFIGS[path], t5x.open_t5x(path)
    plan = plan_restore(abstract(config), t5x.recipes(config), stored)
    assert len(stored) == count
    assert not plan.fresh
    assert plan.ignored == ()
    restored = plan.restore()
    assert set(restored) == set(abstract(config))
    for layer in range(2):
        for ours, theirs in {
            "encoder/layers/mlp/gate/kernel": "encoder/layers_{}/mlp/wi_0/kernel",
            "encoder/layers/self_attention/out/kernel": (
                "encoder/layers_{}/attention/out/kernel"
            ),
            "decoder/layers/mlp/up/kernel": "decoder/layers_{}/mlp/wi_1/kernel",
            "decoder/layers/cross_attention/key/kernel": (
                "decoder/layers_{}/encoder_decoder_attention/key/kernel"
            ),
            "decoder/layers/cross_attention_norm/scale": (
                "decoder/layers_{}/pre_cross_attention_layer_norm/scale"
            ),
        }.items():
            np.testing.assert_array_equal(
                restored[ours][layer], stored[theirs.format(layer)].read()
            )
    np.testing.assert_array_equal(
        restored["head/kernel"], stored["decoder/logits_dense/kernel"].read().T
    )


@needs_shared
def test_inline_arrays_are_those_that_flax_reads():
    tree = serialization.msgpack_restore(MSGPACK.read_bytes())["optimizer"]["target"]
    stored = t5x.open_t5x(MSGPACK)
    for name, tensor in stored.items():
        array = tree
        for part in name.split("/"):
            array = array[part]
        np.testing.assert_array_equal(tensor.read(), array)


@needs_shared
def test_the_embedding_is_the_one_published_beside_the_checkpoint():
    golden = np.load(SHARED / "data/prompts/tiny_embeddings_32128x4.npy")
    stored = t5x.open_t5x(ZARR)
    np.testing.assert_array_equal(stored["token_embedder/embedding"].read(), golden)


@needs_shared
def test_the_ragged_last_chunk_is_clipped():
    folder = ZARR / "checkpoint_3/target.decoder.logits_dense.kernel"
    read = t5x.open_t5x(ZARR)["decoder/logits_dense/kernel"].read()
    last = np.frombuffer(gzip.decompress((folder / "0.7").read_bytes()), "<f4")
    assert read.shape == (4, 32_128)
    np.testing.assert_array_equal(
        read[:, 7 * 4096 :], last.reshape(4, 4096)[:, : 32_128 - 7 * 4096]
    )


@needs_shared
def test_a_checkpoint_is_found_from_each_of_its_paths():
    expected = ZARR / "checkpoint_3/checkpoint"
    for path in (ZARR, ZARR / "checkpoint_3", expected):
        assert t5x.find_checkpoint(path) == expected


def test_the_latest_step_is_the_largest_number(tmp_path):
    for step in (9, 10):
        (tmp_path / f"checkpoint_{step}").mkdir()
        target = {"x": np.full(2, step, np.float32)}
        write_msgpack(tmp_path / f"checkpoint_{step}/checkpoint", target)
    assert t5x.open_t5x(tmp_path)["x"].read()[0] == 10


def test_arrays_that_flax_cut_into_chunks_are_joined(tmp_path, monkeypatch):
    array = np.arange(35, dtype=np.float32).reshape(5, 7)
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 32)
    file = write_msgpack(tmp_path / "checkpoint", {"a": {"b": array}})
    assert b"__msgpack_chunked_array__" in file.read_bytes()
    np.testing.assert_array_equal(t5x.open_t5x(file)["a/b"].read(), array)


def test_scalars_and_bfloat16_are_read(tmp_path):
    target = {
        "scalar": np.float32(2.5),
        "half": np.arange(3).astype(ml_dtypes.bfloat16),
        "zero_dimensional": np.array(3.0),
    }
    stored = t5x.open_t5x(write_msgpack(tmp_path / "checkpoint", target))
    for name, array in target.items():
        np.testing.assert_array_equal(stored[name].read(), array)
        assert stored[name].dtype == array.dtype


def test_t5_1_0_has_one_input_projection_and_no_head():
    config = t5_config(width=8, feed_forward_width=16, layers=1, heads=2, version="1.0")
    table = t5x.recipes(config)
    assert set(table) == set(abstract(config))
    up = table["encoder/layers/mlp/up/kernel"].sources
    assert up == ("encoder/layers_0/mlp/wi/kernel",)


@needs_shared
@pytest.mark.parametrize("kept", [0, 1, 100, 50_000, -1])
def test_a_truncated_msgpack_file_is_refused(kept, tmp_path):
    file = tmp_path / "checkpoint"
    file.write_bytes(MSGPACK.read_bytes()[:kept])
    with pytest.raises(InputError, match=f"{file} .*{file.stat().st_size:,} bytes"):
        t5x.open_t5x(tmp_path)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ({}, "no optimizer/target"),
        ({"x": "PLACEHOLDER://x"}, "Orbax"),
        ({"x": {"driver": "n5", "kvstore": {"path": "x"}}}, "driver 'n5'"),
        ({"x": {"driver": "zarr", "kvstore": {"path": "../x"}}}, "beside the file"),
        (
            {"x": {"driver": "zarr", "kvstore": {"path": "x/"}}},
            r"x/\.zarray is missing",
        ),
        ({"x": {"__msgpack_chunked_array__": True, "shape": {}}}, "whole chunks"),
    ],
)
def test_what_is_not_a_native_checkpoint_is_refused(target, expected, tmp_path):
    write_msgpack(tmp_path / "checkpoint", target)
    with pytest.raises(InputError, match=expected):
        t5x.open_t5x(tmp_path)


def test_folders_without_a_checkpoint_are_named(tmp_path):
    with pytest.raises(InputError, match="nowhere is missing"):
        t5x.open_t5x(tmp_path / "nowhere")
    with pytest.raises(InputError, match="only nothing"):
        t5x.open_t5x(tmp_path)
    (tmp_path / "checkpoint_5").mkdir()
    with pytest.raises(InputError, match="checkpoint_5/checkpoint is missing"):
        t5x.open_t5x(tmp_path)
    (tmp_path / "checkpoint").write_text("{}")
    with pytest.raises(InputError, match="not a"):
        t5x.open_t5x(tmp_path)


def test_uncompressed_chunks_and_their_fill_value(tmp_path):
    chunks = {"0": floats(1, 2, 3)}
    folder = write_zarr(tmp_path / "a", chunks, fill_value=7)
    np.testing.assert_array_equal(open_zarr(folder).read(), [1, 2, 3, 7, 7])
    folder = write_zarr(tmp_path / "b", chunks)
    with pytest.raises(InputError, match=r"b/1, a chunk of \(5,\), is missing"):
        open_zarr(folder).read()


def test_zarr_scalars_bfloat16_and_fortran_order(tmp_path):
    scalar = write_zarr(tmp_path / "a", {"0": floats(3)}, shape=[], chunks=[])
    assert open_zarr(scalar).read() == 3
    data = np.arange(3).astype(ml_dtypes.bfloat16).tobytes()
    half = write_zarr(
        tmp_path / "b", {"0": data}, shape=[2], dtype="bfloat16", chunks=[3]
    )
    np.testing.assert_array_equal(open_zarr(half).read().astype(float), [0, 1])
    columns = write_zarr(
        tmp_path / "c", {"0.0": floats(1, 2, 3, 4)}, shape=[2, 2], chunks=[2, 2]
    )
    np.testing.assert_array_equal(open_zarr(columns).read(), [[1, 2], [3, 4]])
    metadata = json.loads((columns / ".zarray").read_text()) | {"order": "F"}
    (columns / ".zarray").write_text(json.dumps(metadata))
    np.testing.assert_array_equal(open_zarr(columns).read(), [[1, 3], [2, 4]])


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"compressor": {"id": "blosc"}}, "compressor 'blosc'; read are None, 'gzip'"),
        ({"zarr_format": 3}, "zarr_format 3"),
        ({"filters": [{"id": "delta"}]}, "filters"),
        ({"dtype": "float7"}, "unknown dtype 'float7'"),
        ({"chunks": [0]}, "cannot cover"),
        ({"shape": None}, "not zarr 2 metadata"),
    ],
)
def test_zarr_metadata_that_is_not_supported_is_refused(metadata, expected, tmp_path):
    folder = write_zarr(tmp_path / "x", {}, **metadata)
    with pytest.raises(InputError, match=expected):
        open_zarr(folder)


def test_damaged_chunks_are_refused(tmp_path):
    short = write_zarr(tmp_path / "a", {"0": floats(1, 2)})
    with pytest.raises(InputError, match="a/0 holds 8 bytes, expected 12"):
        open_zarr(short).read()
    whole = gzip.compress(floats(1, 2, 3))
    compressor = {"id": "gzip", "level": 1}
    for i, data in enumerate((b"", whole[:5], whole[:-9], b"x" + whole)):
        folder = write_zarr(tmp_path / f"b{i}", {"0": data}, compressor=compressor)
        with pytest.raises(InputError, match=f"b{i}/0 "):
            open_zarr(folder).read()
