"""Reads of a checkpoint's embedding table by prompt initializers."""

import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import serialization
from safetensors.numpy import save_file

from prompt_tuning.checkpoints.formats import t5x_checkpoint
from prompt_tuning.checkpoints.formats.safetensors import open_safetensors
from prompt_tuning.checkpoints.formats.zarr import open_zarr
from prompt_tuning.checkpoints.stored_table import StoredTable
from prompt_tuning.checkpoints.stored_tensors import (
    Recipe,
    StoredTensor,
    assemble,
    identity,
    transpose,
)
from prompt_tuning.core.errors import InputError
from prompt_tuning.pretrained import source as pretrained_source
from prompt_tuning.pretrained.prompted_model import open_pretrained
from prompt_tuning.pretrained.tuning import Tuning
from prompt_tuning.prompts import initializers
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.prompts.soft import SoftPrompt
from prompt_tuning.prompts.tools.recycling import share_tokens
from prompt_tuning.settings.pretrained import Pretrained
from tests.support.dummies import LetterTokenizer
from tests.support.small_runs import DECODER, write_model

V, D = 300, 8
NUMBERS = np.random.default_rng(0).standard_normal((V, D), np.float32)
CHUNK = 50
KEY = jax.random.key(0)


def stored_in_safetensors(folder: Path, array: np.ndarray) -> StoredTensor:
    save_file({"x": np.ascontiguousarray(array)}, folder / "model.safetensors")
    return open_safetensors(folder)["x"]


def stored_in_msgpack(folder: Path, array: np.ndarray) -> StoredTensor:
    tree = {"version": 3, "optimizer": {"target": {"x": array}}}
    (folder / "checkpoint").write_bytes(serialization.msgpack_serialize(tree))
    return t5x_checkpoint.open_t5x(folder / "checkpoint")["x"]


def stored_in_zarr(folder: Path, array: np.ndarray) -> StoredTensor:
    metadata = {
        "zarr_format": 2,
        "shape": array.shape,
        "chunks": [CHUNK, D // 2],
        "dtype": "<f4",
        "compressor": None,
        "fill_value": None,
        "filters": None,
        "order": "C",
    }
    (folder / ".zarray").write_text(json.dumps(metadata))
    for i in range(V // CHUNK):
        for j in range(2):
            rows, columns = slice(i * CHUNK, (i + 1) * CHUNK), slice(4 * j, 4 * j + 4)
            (folder / f"{i}.{j}").write_bytes(array[rows, columns].tobytes())
    return open_zarr(folder)


SOURCES: dict[str, tuple[Callable[[Path, np.ndarray], StoredTensor], type, bool]] = {
    "safetensors": (stored_in_safetensors, np.float32, False),
    "safetensors, bfloat16": (stored_in_safetensors, ml_dtypes.bfloat16, False),
    "safetensors, transposed": (stored_in_safetensors, np.float32, True),
    "msgpack": (stored_in_msgpack, np.float32, False),
    "msgpack in pieces": (stored_in_msgpack, np.float32, False),
    "zarr": (stored_in_zarr, np.float32, False),
}


class Read:
    """Counts the bytes requested from stored arrays: in total and the maximum."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.bytes = self.most = 0
        read = StoredTensor.read

        def counting(tensor, block=None):
            array = read(tensor, block)
            self.bytes += array.nbytes
            self.most = max(self.most, array.nbytes)
            return array

        monkeypatch.setattr(StoredTensor, "read", counting)


@pytest.fixture
def read(monkeypatch) -> Read:
    return Read(monkeypatch)


@pytest.fixture(params=SOURCES)
def source(request, tmp_path, monkeypatch) -> tuple[StoredTable, np.ndarray, int]:
    """A table in a checkpoint, its values, and the bytes of a row."""
    write, dtype, transposed = SOURCES[request.param]
    # Flax then splits it within a row.
    if request.param == "msgpack in pieces":
        monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 1000)
    array = NUMBERS.astype(dtype)
    tensor = write(tmp_path, array.T if transposed else array)
    recipe = Recipe(("x",), transform=transpose if transposed else identity)
    stored = {"x": tensor}
    whole = assemble("table", (V, D), np.dtype(np.float32), recipe, stored)
    table = StoredTable("table", (V, D), recipe, stored)
    return table, whole, D * tensor.dtype.itemsize


@pytest.mark.parametrize(
    "ids", [[7], [299, 0, 7, 8, 9, 7], [50, 49, 51, 120], list(range(100))]
)
def test_rows_equal_the_tables_and_are_read_once(source, ids, read):
    table, whole, row = source
    actual = Vocabulary(table).rows(ids)
    np.testing.assert_array_equal(actual, whole[ids])
    assert actual.dtype == np.float32
    if table._chunk_rows is None:
        assert read.bytes == len(set(ids)) * row
    else:
        assert read.most <= CHUNK * row


@pytest.mark.parametrize(
    "index", [3, -1, slice(None, None, 7), [True] * V, ([[1, 2]],)]
)
def test_indexing_has_the_semantics_of_numpy(source, index):
    table, whole, _ = source
    np.testing.assert_array_equal(table[index], whole[index])


def test_a_table_is_read_completely_in_blocks(source, read, monkeypatch):
    table, whole, row = source
    monkeypatch.setattr(table, "_maximum_rows", 40)
    np.testing.assert_array_equal(np.asarray(table), whole)
    np.testing.assert_array_equal(jnp.asarray(table), whole)
    assert len(table) == V and table.shape == whole.shape
    assert read.bytes == 2 * V * row
    assert read.most <= CHUNK * row


def test_a_chunk_is_unpacked_once_for_all_rows_in_it(tmp_path, monkeypatch):
    table = StoredTable(
        "x", (V, D), Recipe(("x",)), {"x": stored_in_zarr(tmp_path, NUMBERS)}
    )
    for file in tmp_path.glob("[1235].*"):  # the other chunks are not read
        file.unlink()
    blocks, read = [], StoredTensor.read

    def counting(tensor, block):
        blocks.append(block)
        return read(tensor, block)

    monkeypatch.setattr(StoredTensor, "read", counting)
    ids = [0, 210, 30, 15, 249]
    np.testing.assert_array_equal(table[ids], NUMBERS[ids])
    assert sorted(rows.start // CHUNK for rows, _ in blocks) == [0, 4]
    with pytest.raises(InputError, match=r"1\.[01]\" is missing"):
        table[50]


INITIALIZERS = {
    "sampled vocabulary": (initializers.from_sampled_vocabulary(None), 6),
    "common vocabulary": (initializers.from_sampled_vocabulary(20), 6),
    "class labels": (initializers.from_class_labels(["ab", "cad"]), 4),
    "text": (initializers.from_text("heed"), 3),
    "template": (initializers.from_template('{soft:"fig"}{prompt}{soft:3}'), 3),
    "uniform": (initializers.uniform(), 0),
}


@pytest.mark.parametrize("name", INITIALIZERS)
def test_sharded_prompts_start_equal_and_read_only_needed_rows(source, name, read):
    table, whole, row = source
    initializer, used = INITIALIZERS[name]
    expected, actual = (
        np.asarray(initializer(KEY, (6, D), Vocabulary(each, LetterTokenizer())))
        for each in (whole, table)
    )
    np.testing.assert_array_equal(actual, expected)
    if table._chunk_rows is None:
        assert read.bytes <= (used + 1) * row
    elif used == 0:
        assert not read.bytes


def test_recycling_reads_the_common_tokens(tmp_path, read):
    tensor = stored_in_safetensors(tmp_path, NUMBERS)
    table = StoredTable("x", (V, D), Recipe(("x",)), {"x": tensor})
    in_memory, stored = (Vocabulary(x, LetterTokenizer()) for x in (NUMBERS, table))
    shared = [
        share_tokens(in_memory, x, skip_first=2, words=5) for x in (in_memory, stored)
    ]
    np.testing.assert_array_equal(shared[0].target, shared[1].target)
    assert read.bytes == 5 * 4 * D


def test_a_token_without_a_row_in_the_table_is_refused(source):
    table, _, _ = source
    for ids in ([1, V], [-1]):
        with pytest.raises(InputError, match=rf"from token {ids[-1]}, but the model's"):
            Vocabulary(table).rows(ids)


@pytest.fixture
def decoder(tmp_path) -> Pretrained:
    folder = write_model(tmp_path / "decoder", DECODER)
    return Pretrained(checkpoint=str(folder))


def test_opening_a_run_reads_its_prompts_initial_values(decoder, read):
    start = initializers.from_sampled_vocabulary(20)

    def prompt(key, vocabulary):
        return SoftPrompt(key, vocabulary, length=4, initializer=start)

    model = open_pretrained(decoder, Tuning(prompt=prompt), key=KEY)
    started = model.prompts.prompt
    assert isinstance(started, SoftPrompt)
    assert read.bytes == 4 * 4 * model.config.width
    (table,) = (
        array for path, array in model.plan.read() if path.endswith("r/embedding")
    )
    for vector in np.asarray(started()):
        assert any(np.array_equal(vector, row) for row in table[:20])


def test_a_table_with_another_shape_is_refused_before_reading(decoder, read):
    config, recipes, stored = pretrained_source.open_checkpoint(decoder)
    name = recipes["token_embedder/embedding"].sources[0]
    tensor = stored[name]
    stored[name] = StoredTensor((3, 2), tensor.dtype, "here", tensor.read_block)
    with pytest.raises(InputError, match=r"in here has shape \(3, 2\)"):
        pretrained_source.open_embeddings(config, recipes, stored)
    assert not read.bytes
