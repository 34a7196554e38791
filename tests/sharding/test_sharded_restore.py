"""Parameters that are read directly into their shards on a mesh."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from prompt_tuning.checkpoints.stored_tensors import StoredTensor
from prompt_tuning.core.array_slices import clipped
from prompt_tuning.core.quantization.stores import part_path
from prompt_tuning.pretrained.prompted_model import PromptedModel, open_pretrained
from prompt_tuning.settings.mesh_shape import MeshShape
from prompt_tuning.settings.pretrained import Pretrained
from prompt_tuning.sharding.array_placement import Placement, distinct_shards
from tests.support import dummies, meshes
from tests.support.shared_data import FIXTURES
from tests.support.t5x_fixtures import T5X_CONFIG

T5X = FIXTURES / "t5x"
TOYS = {"msgpack": T5X_CONFIG, "zarr": T5X_CONFIG}
FOLDERS = {
    name: FIXTURES / "peft" / name / "base"
    for name in (
        "llama_tied",
        "llama_gqa_untied",
        "qwen2_bias_tied",
        "gpt2_tied",
        "t5v11_untied_gated",
        "t5_orig_tied_relu",
    )
}
MESHES = {
    "tensor 2": MeshShape(data=1, tensor=2),
    "fsdp 2": MeshShape(data=1, fsdp=2),
    "fsdp 2, tensor 2": MeshShape(data=1, fsdp=2, tensor=2),
    "data 2, tensor 2": MeshShape(data=2, tensor=2),
}
CASES = [(name, mesh) for name in (*FOLDERS, *TOYS) for mesh in MESHES]


class BytesRead:
    """Counts the bytes that are requested from all stored arrays."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.count = 0
        read = StoredTensor.read

        def counting(tensor, block=None):
            array = read(tensor, block)
            self.count += array.nbytes
            return array

        monkeypatch.setattr(StoredTensor, "read", counting)


@pytest.fixture
def bytes_read(monkeypatch) -> BytesRead:
    return BytesRead(monkeypatch)


@functools.cache
def checkpoint(name: str, dtype: str) -> tuple[PromptedModel, dict[str, np.ndarray]]:
    """A model on one device, and all its parameters."""
    config = TOYS.get(name)
    folder = T5X / name if config else FOLDERS[name]
    if config:
        (folder,) = folder.glob("*checkpoint_*")
    source = Pretrained(checkpoint=str(folder), config=config, parameter_dtype=dtype)
    model = open_pretrained(source, key=jax.random.key(0))
    return model, model.plan.restore()


def opened(
    name: str, shape: MeshShape, dtype: str = "float32"
) -> tuple[PromptedModel, dict[str, np.ndarray]]:
    """A model on as many of the first devices as the mesh needs, and the whole."""
    model, restored = checkpoint(name, dtype)
    layout = meshes.layout_of(shape, model.config)
    placement = Placement.create(layout, model.graph, model.plan.abstract)
    return dataclasses.replace(model, placement=placement), restored


def assert_equal_and_padded(actual: jax.Array, whole: np.ndarray):
    """Checks that arrays are bitwise equal, with zeros after the vocabulary."""
    inside = tuple(map(slice, whole.shape))
    padded = np.zeros(actual.shape, whole.dtype)
    padded[inside] = whole
    assert actual.dtype == whole.dtype
    for shard in actual.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), padded[shard.index])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_shards_equal_slices_of_the_whole_and_are_read_once(name, mesh, bytes_read):
    model, restored = opened(name, MESHES[mesh])
    bytes_read.count = 0
    parameters = model.read_parameters()
    assert set(parameters) == set(restored)
    for path, array in parameters.items():
        assert_equal_and_padded(array, restored[path])
    # Independent of how many devices have a shard: all belong to one process.
    assert bytes_read.count == sum(array.nbytes for array in restored.values())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_a_process_reads_only_the_bytes_of_its_shards(name, mesh, bytes_read):
    model, restored = opened(name, MESHES[mesh])
    placement = model.placement
    assert placement is not None
    devices = placement.layout.mesh.devices.ravel()
    for device_rows in (devices[: len(devices) // 2], devices[1::2], devices[[0, -1]]):
        bytes_read.count = stored = 0
        for path, read in model.plan.readers():
            sharding, padded = placement.shardings[path], placement.padded_shape(path)
            blocks = [
                clipped(part, restored[path].shape)
                for part, _ in distinct_shards(sharding, padded, device_rows)
            ]
            for block, array in zip(blocks, read(blocks), strict=True):
                np.testing.assert_array_equal(array, restored[path][block])
                stored += array.nbytes
        assert stored <= bytes_read.count <= 1.1 * stored
        if mesh == "fsdp 2, tensor 2":
            assert stored < 0.6 * sum(array.nbytes for array in restored.values())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tensor 2", "fsdp 2, tensor 2"])
@pytest.mark.parametrize("name", ["llama_tied", "gpt2_tied", "zarr"])
def test_int8_shards_equal_slices_of_the_whole_kernel(name, mesh, bytes_read):
    model, restored = opened(name, MESHES[mesh], "int8")
    bytes_read.count = 0
    parameters = model.read_parameters()
    assert set(parameters) == set(restored)
    assert {part_path(path, "scale") for path in model.plan.quantized} <= set(
        parameters
    )
    for path, array in parameters.items():
        assert_equal_and_padded(array, restored[path])
    weights = set(parameters) - model.plan.derived
    # All columns are local, so their scales need no further read.
    assert bytes_read.count == sum(4 * restored[path].size for path in weights)


@pytest.mark.parametrize("size", [31, 9])
def test_only_existing_rows_of_a_padded_vocabulary_are_read(size):
    config = dataclasses.replace(dummies.LLAMA, vocabulary_size=size)
    graph, parameters = dummies.unprompted(config)
    layout = meshes.layout_of(MeshShape(data=1, fsdp=2, tensor=2), config)
    placement = meshes.placed(layout, graph, parameters)
    path = "token_embedder/embedding"
    table, blocks = np.asarray(parameters[path]), []

    def read(parts):
        blocks.extend(parts)
        return [table[part] for part in parts]

    actual = placement.restore(path, read)
    assert actual.shape == (-(-size // 4) * 4, config.width)
    assert_equal_and_padded(actual, table)
    rows = sorted((part[0].start, part[0].stop) for part in blocks)
    # Each device has three of 9 rows; the last device has only padding.
    assert rows[-2:] == {31: [(16, 24), (24, 31)], 9: [(6, 9), (9, 9)]}[size]
