"""Valid, damaged and malicious files in NumPy's formats."""

import io
import tracemalloc
import zipfile
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.numpy_files import read_npy, read_npz


@pytest.fixture
def peak():
    """Returns a function for the peak memory in bytes since the test's start."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


def npy(text, data=b"", version=1):
    header = text.encode().ljust(118) + b"\n"
    return (
        b"\x93NUMPY"
        + bytes([version, 0])
        + len(header).to_bytes(2, "little")
        + (header + data)
    )


def declared(shape, dtype: Any = "<f4"):
    return f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}"


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_, ">f8", "<U3"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 4), (2, 0, 5)])
def test_files_written_by_numpy_are_read(shape, dtype, tmp_path):
    array = np.ones(shape, dtype)
    np.save(tmp_path / "a.npy", array)
    np.testing.assert_array_equal(read_npy(tmp_path / "a.npy"), array)
    np.savez(tmp_path / "a.npz", one=array, two=np.arange(3))
    arrays = read_npz(tmp_path / "a.npz")
    assert list(arrays) == ["one", "two"]
    np.testing.assert_array_equal(arrays["one"], array)


def test_column_order_and_bfloat16_are_read(tmp_path):
    array = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    np.save(tmp_path / "a.npy", array)
    np.testing.assert_array_equal(read_npy(tmp_path / "a.npy"), array)
    np.save(tmp_path / "b.npy", array.astype(ml_dtypes.bfloat16))
    assert read_npy(tmp_path / "b.npy").itemsize == 2


@pytest.mark.parametrize(
    "content",
    [
        npy(declared((10**12,))),
        npy(declared((10**12, 10**12, 10**12)), bytes(64)),
        npy(declared((2**62, 4)), bytes(64)),
        npy(declared((-1,)), bytes(64)),
        npy(declared((-2, -2)), bytes(64)),
        npy(declared((0, 10**30))),
        npy(declared((10**12,), "<U0")),
        npy(declared((1,) * 70), bytes(4)),
        npy(declared((4,), "|O"), bytes(64)),
        npy(declared((4,), [("a", "<f4")]), bytes(64)),
        npy(declared((4,), "(1000000000000,)f4"), bytes(64)),
        npy(declared("(3.0,)"), bytes(64)),
        npy(declared("(" * 5000)),
        npy("{'descr': '<f4'}"),
        npy("\0" * 50),
        npy("{'a': " + "[" * 90),
        npy(declared((3,), "hello"), bytes(64)),
        npy(declared((3,)), bytes(12), version=9),
        npy(declared((3,)), bytes(11)),
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + bytes(100),
        b"\x93NUMPY",
        b"",
        b"\x80\x04\x95",
    ],
)
def test_damaged_files_are_refused_without_memory(content, tmp_path, peak):
    (tmp_path / "a.npy").write_bytes(content)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("a.npy", content)
    with pytest.raises(InputError, match=r"a\.npy"):
        read_npy(tmp_path / "a.npy")
    with pytest.raises(InputError, match=r"a\.npz"):
        read_npz(tmp_path / "a.npz")
    assert peak() < 2**22


def test_both_sizes_are_in_the_message(tmp_path):
    (tmp_path / "a.npy").write_bytes(npy(declared((10**12,)), bytes(8)))
    with pytest.raises(InputError, match=r"137 bytes.*declares 4,000,000,000,129"):
        read_npy(tmp_path / "a.npy")


def test_every_flipped_byte_of_a_header_is_read_or_refused(tmp_path):
    buffer = io.BytesIO()
    np.save(buffer, np.arange(6, dtype=np.float32).reshape(2, 3))
    for position in range(128):
        for mask in (1, 8, 64, 255):
            content = bytearray(buffer.getvalue())
            content[position] ^= mask
            (tmp_path / "a.npy").write_bytes(content)
            try:
                assert read_npy(tmp_path / "a.npy").nbytes <= 24
            except InputError as error:
                assert "a.npy" in str(error)


def test_folders_missing_files_and_objects_are_refused(tmp_path):
    for read in (read_npy, read_npz):
        with pytest.raises(InputError):
            read(tmp_path)
        with pytest.raises(InputError):
            read(tmp_path / "nothing")
    np.save(tmp_path / "a.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(InputError, match="pickles are never read"):
        read_npy(tmp_path / "a.npy")


def test_a_compressed_archive_is_refused_before_it_is_unpacked(tmp_path, peak):
    np.savez_compressed(tmp_path / "a.npz", a=np.zeros(10_000_000))
    tracemalloc.reset_peak()
    assert (tmp_path / "a.npz").stat().st_size < 100_000
    with pytest.raises(InputError, match="compressed"):
        read_npz(tmp_path / "a.npz")
    assert peak() < 2**22


def test_an_archive_that_declares_more_than_it_has_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.zeros(100))
    content = bytearray((tmp_path / "a.npz").read_bytes())
    directory = content.rindex(b"PK\x01\x02")
    content[directory + 24 : directory + 28] = (2**31).to_bytes(4, "little")
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(InputError, match=r"declares 2,147,483,648"):
        read_npz(tmp_path / "a.npz")
    (tmp_path / "a.npz").write_bytes(content[:200])
    with pytest.raises(InputError, match="not an archive"):
        read_npz(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("content", "format"),
    [
        (b"\x80\x04\x95secret", "a pickle"),
        (b"PK\x03\x04secret", "a ZIP archive"),
        (b"\x89HDF\r\n\x1a\nsecret", "an HDF5 file"),
        (b"secret", "of an unknown format"),
        (b"", "of an unknown format"),
    ],
)
def test_another_format_is_named_without_what_the_file_contains(
    tmp_path, content, format
):
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(InputError, match=rf"a\.npy is {format}") as problem:
        read_npy(tmp_path / "a.npy")
    assert "secret" not in str(problem.value)
