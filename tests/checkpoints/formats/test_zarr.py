import gzip
import json
import os
import struct
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorstore

from prompt_tuning.checkpoints.formats.zarr import open_zarr
from prompt_tuning.core.errors import InputError


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


def test_uncompressed_chunks_and_their_fill_value(tmp_path):
    chunks = {"0": floats(1, 2, 3)}
    folder = write_zarr(tmp_path / "a", chunks, fill_value=7)
    np.testing.assert_array_equal(open_zarr(folder).read(), [1, 2, 3, 7, 7])
    folder = write_zarr(tmp_path / "b", chunks)
    with pytest.raises(InputError, match=r"missing: .*b/1"):
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
        ({"compressor": {"id": "unheard"}}, "unheard"),
        ({"zarr_format": 3}, "zarr_format"),
        ({"filters": [{"id": "delta"}]}, "filters"),
        ({"dtype": "float7"}, "float7"),
        ({"chunks": [0]}, "chunks"),
        ({"chunks": [3, 3]}, "chunks"),
        ({"shape": None}, "shape"),
    ],
)
def test_metadata_that_is_not_supported_is_refused(metadata, expected, tmp_path):
    folder = write_zarr(tmp_path / "x", {}, **metadata)
    with pytest.raises(InputError, match=rf"x/\.zarray is not zarr 2 .*{expected}"):
        open_zarr(folder)


@pytest.mark.parametrize("text", ["", "{", "[1]", "7"])
def test_metadata_that_is_damaged_is_refused(text, tmp_path):
    (tmp_path / ".zarray").write_text(text)
    with pytest.raises(InputError, match=r"\.zarray is not"):
        open_zarr(tmp_path)


@pytest.mark.parametrize(
    "compressor",
    [
        {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1},
        {"id": "gzip", "level": 1},
        {"id": "zlib", "level": 1},
        {"id": "bz2", "level": 1},
        {"id": "zstd", "level": 1},
    ],
    ids=lambda compressor: compressor["id"],
)
def test_every_compressor_is_read(compressor, tmp_path):
    array = np.arange(77, dtype=np.float32).reshape(7, 11)
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": f"{tmp_path}/x/"},
        "metadata": {
            "shape": [7, 11],
            "chunks": [3, 4],
            "dtype": "<f4",
            "compressor": compressor,
        },
    }
    tensorstore.open(spec, create=True).result()[...] = array
    stored = open_zarr(tmp_path / "x")
    assert (stored.shape, stored.pieces) == ((7, 11), (3, 4))
    np.testing.assert_array_equal(stored.read(), array)
    part = (slice(2, 5), slice(3, 9))
    np.testing.assert_array_equal(stored.read(part), array[part])


def test_damaged_chunks_are_refused(tmp_path):
    for i, data in enumerate((floats(1, 2), floats(1, 2, 3, 4), b"")):
        folder = write_zarr(tmp_path / f"a{i}", {"0": data}, shape=[3])
        with pytest.raises(InputError, match=f"a{i}/0"):
            open_zarr(folder).read()
    whole = gzip.compress(floats(1, 2, 3))
    compressor = {"id": "gzip", "level": 1}
    flipped = whole[:-6] + bytes([whole[-6] ^ 1]) + whole[-5:]  # within the checksum
    damaged = (b"", whole[:5], whole[:-10], b"x" + whole, whole + b"x", flipped)
    for i, data in enumerate(damaged):
        chunks = {"0": data}
        folder = write_zarr(
            tmp_path / f"b{i}", chunks, shape=[3], compressor=compressor
        )
        with pytest.raises(InputError, match=f"b{i}/0"):
            open_zarr(folder).read()


GZIP = {"id": "gzip", "level": 1}


@pytest.mark.parametrize("compressor", [None, GZIP])
@pytest.mark.parametrize(
    ("shape", "chunks"),
    [([5], [2**40]), ([5, 5], [2**20, 2**20]), ([2**40], [2**40]), ([0], [2**33])],
)
def test_chunks_that_exceed_their_array_are_refused(
    shape, chunks, compressor, tmp_path
):
    data = gzip.compress(floats(1, 2, 3))
    name = ".".join("0" * len(shape))
    metadata = {"shape": shape, "chunks": chunks, "compressor": compressor}
    folder = write_zarr(tmp_path / "x", {name: data}, **metadata)
    with pytest.raises(InputError, match=r"declares chunks of .* expected at most"):
        open_zarr(folder)


def test_chunks_may_exceed_a_small_array(tmp_path):
    data = {"0": np.arange(1000, dtype="<f4").tobytes()}
    folder = write_zarr(tmp_path / "x", data, shape=[2], chunks=[1000])
    np.testing.assert_array_equal(open_zarr(folder).read(), [0, 1])


def zeros() -> bytes:
    """Returns a gzip file of 300 MB of zeros."""
    compressor = zlib.compressobj(1, wbits=31)
    packed = [compressor.compress(bytes(10**7)) for _ in range(30)]
    return b"".join([*packed, compressor.flush()])


def peak() -> int:
    """Returns the largest memory of this process since `clear_refs`, in bytes."""
    line = Path("/proc/self/status").read_text().partition("VmHWM:")[2]
    return 1024 * int(line.split()[0])


BOMBS = {
    "gzip": zeros,
    # Headers that declare 2 GB and 1 TB.
    "blosc": lambda: b"\2\1\x21\4" + struct.pack("<3I", 2**31 - 17, 64, 64) + bytes(48),
    "zstd": lambda: b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 2**40) + b"\1\0\0",
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_chunk_that_expands_to_gigabytes_needs_no_memory(kind, tmp_path):
    compressor = {"id": kind, "level": 1}
    if kind == "blosc":
        compressor = {"id": kind, "cname": "lz4", "clevel": 5, "shuffle": 1}
    folder = write_zarr(tmp_path / "x", {"0": BOMBS[kind]()}, compressor=compressor)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    with pytest.raises(InputError, match="x"):
        open_zarr(folder).read((slice(0, 2),))
    assert peak() - before < 10**8


def test_pipes_and_deep_metadata_are_refused(tmp_path):
    folder = write_zarr(tmp_path / "x", {})
    os.mkfifo(folder / "0")
    with pytest.raises(InputError, match="x/0 is not a file"):
        open_zarr(folder)
    (folder / "0").unlink()
    for text in ("[" * 100_000, '{"zarr_format":' * 100_000):
        (folder / ".zarray").write_text(text)
        with pytest.raises(InputError, match=r"\.zarray"):
            open_zarr(folder)
