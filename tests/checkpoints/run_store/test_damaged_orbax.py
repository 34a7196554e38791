"""Damaged checkpoints in Orbax's format with correct checksums."""

import json
import os
import shutil

import numpy as np
import pytest

from prompt_tuning.checkpoints.run_store import checkpoint_files
from prompt_tuning.core.errors import InputError
from tests.support.orbax_checkpoints import (
    ARRAY,
    LEAF,
    read_metadata,
    seal,
    write_checkpoint,
    write_metadata,
)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("run"))


@pytest.fixture
def checkpoint(written, tmp_path):
    return shutil.copytree(written, tmp_path / "checkpoint_1")


def read(checkpoint):
    state = checkpoint_files.verify(checkpoint)
    return checkpoint_files.read_trained(checkpoint, state)[LEAF]


def declare(checkpoint, **metadata):
    """Changes the metadata of the stored array."""
    content = json.loads(read_metadata(checkpoint)) | metadata
    write_metadata(checkpoint, json.dumps(content).encode())


def test_an_untouched_copy_is_read(checkpoint):
    seal(checkpoint)
    np.testing.assert_array_equal(read(checkpoint), ARRAY)
    (count,) = checkpoint_files.read_optimizer_leaves(checkpoint).values()
    assert np.asarray(count) == 3


@pytest.mark.parametrize(
    "metadata",
    [
        {"compressor": {"id": "blosc", "cname": "lz4", "clevel": 1, "shuffle": 0}},
        {"shape": [10**11, 4]},
        {"shape": [10**11, 4], "fill_value": 0.0},
        {"chunks": [2**20, 2**20]},
        {"shape": [2, 4]},
        {"shape": [12], "chunks": [12]},
        {"dtype": "<f8"},
        {"shape": "34"},
    ],
    ids=str,
)
def test_arrays_declared_differently_are_refused(metadata, checkpoint):
    declare(checkpoint, **metadata)
    seal(checkpoint)
    with pytest.raises(InputError, match=f"trained '{LEAF}'"):
        read(checkpoint)


def test_metadata_that_crashes_tensorstore_is_refused(checkpoint):
    write_metadata(checkpoint, b"[" * 100_000 + b"]" * 100_000)
    seal(checkpoint)
    with pytest.raises(InputError, match=r"\.zarray nests its JSON more than 100"):
        read(checkpoint)


def test_a_pipe_is_not_opened(checkpoint):
    file = sorted((checkpoint / "arrays/d").iterdir())[0]
    file.unlink()
    os.mkfifo(file)
    seal(checkpoint)
    with pytest.raises(
        InputError, match=r"expected only the files that its state\.json"
    ):
        read(checkpoint)


def test_another_version_of_the_metadata_is_refused(checkpoint):
    file = checkpoint / "arrays/_METADATA"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_zarr3": True}))
    seal(checkpoint)
    with pytest.raises(InputError, match="_METADATA has use_zarr3"):
        read(checkpoint)


@pytest.mark.parametrize(
    "leaf",
    [
        {"shape": [10**9, 4], "dtype": "float32"},
        {"shape": [3, 4, 1], "dtype": "float32"},
        {"shape": [3, 4], "dtype": "int32"},
        {"shape": [3, 4], "dtype": "object"},
        {"shape": [3, 4], "dtype": "f4,f4"},
        {"shape": [3, 4], "dtype": ["f4"]},
        {"shape": [-3, 4], "dtype": "float32"},
        {"shape": [3, 4]},
        7,
    ],
    ids=str,
)
def test_states_that_declare_other_leaves_are_refused(leaf, checkpoint):
    seal(checkpoint, lambda state: state.update(trained={LEAF: leaf}))
    with pytest.raises(InputError, match="trained"):
        read(checkpoint)


def test_paths_out_of_the_folder_are_refused(checkpoint):
    leaf = {"shape": [3, 4], "dtype": "float32"}
    seal(checkpoint, lambda state: state.update(trained={"../../x": leaf}))
    with pytest.raises(InputError, match=r"a path with \.\."):
        read(checkpoint)


def test_every_damaged_file_is_refused_or_not_needed(checkpoint, written):
    for file in sorted((checkpoint / "arrays").rglob("*")):
        if not file.is_file():
            continue
        content = file.read_bytes()
        for damaged in (b"", content[:-1], content[: len(content) // 2], b"[" * 5000):
            file.write_bytes(damaged)
            seal(checkpoint)
            try:
                np.testing.assert_array_equal(read(checkpoint), ARRAY)
            except InputError as error:
                assert str(checkpoint) in str(error)
        file.write_bytes(content)
