"""Blocks of stored arrays that are read for a part of a parameter."""

import json

import ml_dtypes
import numpy as np
import pytest
from flax import serialization

from prompt_tuning.checkpoints.formats import t5x_checkpoint
from prompt_tuning.checkpoints.formats.zarr import open_zarr
from prompt_tuning.checkpoints.quantized_kernel import QuantizedKernel
from prompt_tuning.checkpoints.stored_tensors import (
    FusedPart,
    StoredTensor,
    assemble_parts,
    identity,
    layered,
    transpose,
)
from prompt_tuning.core.array_slices import clipped, extent, joined, relative, whole
from prompt_tuning.core.quantization.channels import channel_scale, quantize

NUMBERS = np.arange(48, dtype=np.float32).reshape(4, 12)


class Counted:
    """A stored array that records the shapes of the blocks that are read."""

    def __init__(self, array: np.ndarray):
        self.array, self.shapes = array, []

    def tensor(self) -> StoredTensor:
        return StoredTensor(self.array.shape, self.array.dtype, "file", self.read)

    def read(self, block) -> np.ndarray:
        self.shapes.append(extent(block))
        return self.array[block]


def block(*bounds: tuple[int, int]):
    return tuple(slice(*pair) for pair in bounds)


def test_blocks_without_a_gap_are_joined():
    left, right = block((0, 2), (0, 3)), block((0, 2), (3, 4))
    assert joined([left]) == left
    assert joined([right, left]) == block((0, 2), (0, 4))
    assert joined([left, block((0, 2), (4, 5))]) is None
    assert joined([block((0, 1), (0, 1)), block((1, 2), (1, 2))]) is None
    assert relative(right, block((0, 2), (0, 4))) == block((0, 2), (3, 4))
    assert relative(right, block((0, 2), (2, 5))) == block((0, 2), (1, 2))


def test_a_block_beyond_the_end_is_empty():
    assert clipped((slice(2, 6), slice(None)), (4, 3)) == block((2, 4), (0, 3))
    assert extent(clipped(block((6, 8)), (5,))) == (0,)


@pytest.mark.parametrize(
    ("transform", "made"),
    [
        (identity, NUMBERS),
        (transpose, NUMBERS.T),
        (FusedPart(0, (1, 1, 1)), NUMBERS[:, :4]),
        (FusedPart(2, (1, 1, 1)), NUMBERS[:, 8:]),
    ],
)
def test_a_transform_reads_only_the_numbers_of_a_block(transform, made):
    stored, part = Counted(NUMBERS), block((1, 3), (2, 4))
    actual = transform.read(stored.tensor(), part)
    np.testing.assert_array_equal(actual, made[1:3, 2:4])
    assert stored.shapes == [(2, 2)]
    np.testing.assert_array_equal(transform(NUMBERS), made)


def test_only_the_shards_layers_and_columns_of_a_stack_are_read():
    stored = [Counted(NUMBERS + 100 * i) for i in range(3)]
    tensors = {str(i): each.tensor() for i, each in enumerate(stored)}
    recipe = layered("{}", 3, transpose)
    parts = [block((1, 3), (0, 6), (0, 4)), block((1, 2), (6, 12), (2, 4))]
    actual = assemble_parts("w", (3, 12, 4), NUMBERS.dtype, recipe, tensors, parts)
    stack = np.stack([each.array.T for each in stored])
    for part, array in zip(parts, actual, strict=True):
        np.testing.assert_array_equal(array, stack[part])
    assert [each.shapes for each in stored] == [[], [(4, 6), (2, 6)], [(4, 6)]]


def test_adjacent_shards_are_read_together():
    stored = Counted(NUMBERS)
    parts = [block((0, 1), (0, 12), (i, i + 1)) for i in range(4)]
    recipe, tensors = layered("{}", 1, transpose), {"0": stored.tensor()}
    actual = assemble_parts("w", (1, 12, 4), NUMBERS.dtype, recipe, tensors, parts)
    np.testing.assert_array_equal(np.concatenate(actual, -1)[0], NUMBERS.T)
    assert stored.shapes == [(4, 12)]


def quantized(stored: list[Counted]) -> QuantizedKernel:
    tensors = {str(i): each.tensor() for i, each in enumerate(stored)}
    return QuantizedKernel("w", (2, 12, 4), layered("{}", 2, transpose), tensors)


@pytest.mark.parametrize(
    ("parts", "read"),
    [
        ([((0, 12), (2, 4))], (2, 12)),  # columns: only their numbers
        ([((0, 6), (0, 4))], (4, 12)),  # rows: the others too, for the scales
        ([((0, 6), (0, 2)), ((6, 12), (0, 2))], (2, 12)),  # once for both
    ],
)
def test_int8_shards_have_the_scales_of_whole_columns(parts, read):
    random = np.random.default_rng(0)
    stored = [Counted(random.standard_normal((4, 12), "f4")) for _ in range(2)]
    weights = np.stack([each.array.T for each in stored])
    scale = channel_scale(weights)
    kernel = quantized(stored)
    blocks = [block((0, 2), *part) for part in parts]
    for part, actual in zip(blocks, kernel.read(blocks), strict=True):
        np.testing.assert_array_equal(actual, quantize(weights, scale)[part])
    columns = parts[0][1]
    (scales,) = kernel.read_scales([block((0, 2), columns)])
    np.testing.assert_array_equal(scales, scale[:, slice(*columns)])
    assert [each.shapes for each in stored] == [[read], [read]]


def test_scales_can_be_read_without_their_kernel():
    stored = [Counted(NUMBERS), Counted(NUMBERS - 60)]
    (scales,) = quantized(stored).read_scales([block((0, 2), (1, 3))])
    largest = np.array([[23, 35], [48, 36]], np.float32)
    np.testing.assert_array_equal(scales, largest / np.float32(127))


def test_only_the_zarr_chunks_of_a_block_are_read(tmp_path):
    metadata = {
        "zarr_format": 2,
        "shape": [4, 11],
        "chunks": [2, 3],
        "dtype": "<f4",
        "compressor": None,
        "fill_value": None,
        "filters": None,
        "order": "C",
    }
    (tmp_path / ".zarray").write_text(json.dumps(metadata))
    stored = np.pad(NUMBERS[:, :11], ((0, 0), (0, 1)))
    for i, j in (
        (1, 1),
        (1, 2),
        (1, 3),
    ):  # no others, nor a fill value
        chunk = stored[2 * i : 2 * i + 2, 3 * j : 3 * j + 3]
        (tmp_path / f"{i}.{j}").write_bytes(chunk.tobytes())
    tensor = open_zarr(tmp_path)
    for part in (block((2, 4), (3, 11)), block((3, 4), (5, 7)), block((2, 3), (6, 9))):
        np.testing.assert_array_equal(tensor.read(part), NUMBERS[part])
    with pytest.raises(ValueError, match=r"damaged or missing: .*1\.0"):
        tensor.read(block((2, 4), (2, 11)))


@pytest.mark.parametrize("limit", [4, 20, 32, 48, 96, 100, 10_000])
def test_blocks_of_an_array_in_chunks_of_flax(limit, tmp_path, monkeypatch):
    array = np.arange(5 * 3 * 4, dtype=np.float32).reshape(5, 3, 4)
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", limit)
    tree = {"version": 3, "optimizer": {"target": {"x": array}}}
    file = tmp_path / "checkpoint"
    file.write_bytes(serialization.msgpack_serialize(tree))
    tensor = t5x_checkpoint.open_t5x(file)["x"]
    parts = [
        whole(array.shape),
        block((1, 4), (0, 3), (0, 4)),
        block((0, 5), (1, 2), (2, 4)),
        block((2, 3), (0, 1), (3, 4)),
        block((4, 5), (1, 3), (0, 4)),
        block((2, 2), (0, 3), (0, 4)),
    ]
    for part in parts:
        np.testing.assert_array_equal(tensor.read(part), array[part])


def test_a_bfloat16_array_may_begin_at_any_byte(tmp_path):
    array = np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3)
    for name in ("x", "xy"):
        tree = {"version": 3, "optimizer": {"target": {name: array}}}
        file = tmp_path / name
        file.write_bytes(serialization.msgpack_serialize(tree))
        actual = t5x_checkpoint.open_t5x(file)[name].read(block((1, 2), (0, 2)))
        np.testing.assert_array_equal(actual.astype("f4"), [[3, 4]])
