"""HDF5 files that refer to other files or to code, declare too much or are damaged."""

import os
import shutil
import time
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.rows import hdf5_files
from prompt_tuning.data.rows.hdf5_rows import Hdf5Rows
from prompt_tuning.data.rows.token_columns import TokenColumns
from prompt_tuning.data.tools.token_type_files import add_token_types
from prompt_tuning.data.tools.type_rules import AllCompletion
from prompt_tuning.evaluation.categories import _Column

ROWS = np.arange(12, dtype=np.int32).reshape(3, 4)
SECRET = b"0123456789abcdef" * 3


def external_link(folder: Path, file: h5py.File, name: str) -> None:
    with h5py.File(folder / "foreign.hdf5", "w") as foreign:
        foreign["secret"] = ROWS
    file[name] = h5py.ExternalLink("foreign.hdf5", "secret")


def soft_link(folder: Path, file: h5py.File, name: str) -> None:
    file["target"] = ROWS
    file[name] = h5py.SoftLink("/target")


def dangling_link(folder: Path, file: h5py.File, name: str) -> None:
    file[name] = h5py.SoftLink("/absent")


def circular_link(folder: Path, file: h5py.File, name: str) -> None:
    file[name] = h5py.SoftLink(f"/{name}")


def virtual_data_set(folder: Path, file: h5py.File, name: str) -> None:
    with h5py.File(folder / "foreign.hdf5", "w") as foreign:
        foreign["secret"] = ROWS
    layout = h5py.VirtualLayout(ROWS.shape, np.int32)
    layout[:] = h5py.VirtualSource(folder / "foreign.hdf5", "secret", ROWS.shape)
    file.create_virtual_dataset(name, layout)


def external_storage(folder: Path, file: h5py.File, name: str) -> None:
    (folder / "secret").write_bytes(SECRET)
    external = [(str(folder / "secret"), 0, len(SECRET))]
    file.create_dataset(name, ROWS.shape, np.int32, external=external)


FOREIGN = [
    (external_link, "a link to a file"),
    (soft_link, "a soft link"),
    (dangling_link, "a soft link"),
    (circular_link, "a soft link"),
    (virtual_data_set, "is virtual"),
    (external_storage, "is stored in other files"),
]


def write(path: Path, **data_sets) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in data_sets.items():
            file[name] = values
    return path


def write_foreign(folder: Path, name: str, add) -> Path:
    """Writes rows with a data set of that name, which `add` creates."""
    path = folder / "rows.hdf5"
    with h5py.File(path, "w") as file:
        if name != "input_ids":
            file["input_ids"] = ROWS
        add(folder, file, name)
    return path


@pytest.mark.parametrize("name", ["input_ids", "token_type_ids", "classes"])
@pytest.mark.parametrize(("add", "message"), FOREIGN)
def test_rows_from_other_files_are_refused(tmp_path, name, add, message):
    path = write_foreign(tmp_path, name, add)
    columns = TokenColumns(balance="classes" if name == "classes" else None)
    with pytest.raises(InputError, match=f"rows.hdf5.*{name}.*{message}"):
        Hdf5Rows(path, columns=columns)
    if name == "classes":
        with pytest.raises(InputError, match=f"rows.hdf5.*{name}.*{message}"):
            _Column([path], name)


@pytest.mark.parametrize("name", ["input_ids", "token_type_ids", "group/deep"])
@pytest.mark.parametrize(("add", "message"), FOREIGN)
def test_no_other_file_is_copied_with_types(tmp_path, name, add, message):
    path = write_foreign(tmp_path, name, add)
    before = path.read_bytes()
    with pytest.raises(InputError, match=message):
        add_token_types(path, AllCompletion(), replace=True)
    assert path.read_bytes() == before


def test_a_group_behind_a_link_is_not_read(tmp_path):
    write(tmp_path / "foreign.hdf5", classes=np.zeros(3, int))
    path = write(tmp_path / "rows.hdf5", input_ids=ROWS)
    with h5py.File(path, "a") as file:
        file["group"] = h5py.ExternalLink("foreign.hdf5", "/")
    with pytest.raises(InputError, match="'group' is a link to a file"):
        Hdf5Rows(path, columns=TokenColumns(balance="group/classes"))


def test_data_sets_in_groups_are_read(tmp_path):
    path = write(tmp_path / "rows.hdf5", input_ids=ROWS)
    with h5py.File(path, "a") as file:
        file["group/classes"] = np.array([0, 0, 1])
    assert len(Hdf5Rows(path, columns=TokenColumns(balance="group/classes"))) == 3


def test_filters_that_are_plugins_are_refused(tmp_path):
    """Filter 32001 (blosc) is not part of HDF5; reading would look for its library."""
    path = tmp_path / "rows.hdf5"
    with h5py.File(path, "w") as file:
        settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        settings.set_chunk((1, 4))
        settings.set_filter(32001, h5py.h5z.FLAG_OPTIONAL, (1,))
        space, kind = h5py.h5s.create_simple((3, 4)), h5py.h5t.NATIVE_INT32
        h5py.h5d.create(file.id, b"input_ids", kind, space, settings)
    with pytest.raises(InputError, match="has the HDF5 filter 32001, expected gzip"):
        Hdf5Rows(path)


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "gzip"},
        {"compression": "lzf"},
        {"compression": "gzip", "shuffle": True, "fletcher32": True},
    ],
)
def test_built_in_filters_are_read(tmp_path, options):
    with h5py.File(tmp_path / "rows.hdf5", "w") as file:
        file.create_dataset("input_ids", data=ROWS, **options)
    np.testing.assert_array_equal(
        Hdf5Rows(tmp_path / "rows.hdf5")[1].input_ids, ROWS[1]
    )


def unpacked(file: h5py.File, size: int) -> None:
    """A chunk of 64 KiB, in which a compressed stream of `size` bytes is stored."""
    ids = file.create_dataset(
        "input_ids", (1, 2**14), "i4", chunks=(1, 2**14), compression="gzip"
    )
    packer = zlib.compressobj(9)
    zeros = bytes(2**20)
    content = b"".join(packer.compress(zeros) for _ in range(size >> 20))
    ids.id.write_direct_chunk((0, 0), content + packer.flush())


def one_long_row(file: h5py.File) -> None:
    ids = file.create_dataset(
        "input_ids", (1, 2**28), "i1", chunks=(1, 2**20), compression="gzip"
    )
    ids[:, : 2**20] = 1
    file["padding"] = np.random.default_rng(0).integers(0, 256, 2**19, np.uint8)


OVERSIZED = {
    "declared": (
        lambda file: file.create_dataset(
            "input_ids", (2**31, 2**31), "i4", chunks=(1, 1024), compression="gzip"
        ),
        "times the size of the file",
    ),
    "row": (one_long_row, "a row of 'input_ids' has 268,435,456 bytes, expected"),
    "chunk": (
        lambda file: file.create_dataset(
            "input_ids", (4, 4), "i8", maxshape=(None, None), chunks=(2**14, 2**13)
        ),
        "a chunk of 'input_ids' has 1,073,741,824 bytes, expected at most 268,435,456",
    ),
    "bomb": (lambda file: unpacked(file, 2**22), "unpacks to more than 65,536"),
}


@pytest.mark.parametrize("case", OVERSIZED)
def test_sizes_beyond_the_file_are_refused_immediately(tmp_path, case, monkeypatch):
    monkeypatch.setattr(hdf5_files, "INSPECTED_CHUNK", 2**10)
    build, message = OVERSIZED[case]
    path = tmp_path / "rows.hdf5"
    with h5py.File(path, "w") as file:
        build(file)
    before = time.monotonic()
    with pytest.raises(InputError, match=message):
        list(Hdf5Rows(path).blocks())
    assert time.monotonic() - before < 30


def test_flipped_bytes_are_reported(tmp_path):
    """Every fifth byte that is not 0; h5py raises errors of many classes."""
    path = tmp_path / "whole.hdf5"
    with h5py.File(path, "w", libver="earliest") as file:
        file.create_dataset("input_ids", data=ROWS, chunks=(2, 4), compression="gzip")
        file["token_type_ids"] = ROWS % 4
    content = path.read_bytes()
    random = np.random.default_rng(0)
    refused = 0
    for position in np.flatnonzero(np.frombuffer(content, np.uint8))[::5]:
        damaged = bytearray(content)
        damaged[position] ^= int(random.integers(1, 256))
        copy = tmp_path / "damaged.hdf5"
        copy.write_bytes(damaged)
        try:
            rows = Hdf5Rows(copy)
            list(rows.blocks())
            rows.read(0, slice(None))
        except InputError as problem:
            assert "damaged.hdf5" in str(problem)
            refused += 1
    assert refused


def test_a_temporary_copy_of_a_killed_process_is_removed(tmp_path):
    path = write(tmp_path / "rows.hdf5", input_ids=ROWS)
    shutil.copy(path, tmp_path / ".rows.hdf5.999999999.tmp")
    mine = tmp_path / f".rows.hdf5.{os.getppid()}.tmp"
    shutil.copy(path, mine)
    add_token_types(path, AllCompletion())
    assert sorted(tmp_path.iterdir()) == sorted([mine, path])
