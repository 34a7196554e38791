"""Streamed weights on a mesh: each device reads and copies only its own shards."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prompt_tuning import processes
from prompt_tuning.cli.main import main
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import merge
from prompt_tuning.pretrained.weight_storage import WeightStorage, check_location
from prompt_tuning.settings.mesh_shape import MeshShape
from prompt_tuning.streaming.layered_weights import LayeredWeight, LayerReader
from prompt_tuning.training.output_gradients import OutputStep
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.streamed_step import streamed_step
from tests.support import dummies, meshes
from tests.support.exhaustive import sample
from tests.support.printed import assert_same_printed
from tests.support.small_runs import DECODER, logged, write_model

SGD = optax.sgd(0.1)
STEPS = 5
FSDP = MeshShape(data=1, fsdp=2)


class Counted(LayerReader):
    """A reader that counts the bytes of the layers on each device."""

    def __init__(self):
        super().__init__()
        self.bytes: dict[object, int] = {}

    def visit(self, weights, order, compute):
        def counted(index, layer):
            for shard in (shard for x in layer for shard in x.addressable_shards):
                size = self.bytes.get(shard.device, 0)
                self.bytes[shard.device] = size + shard.data.nbytes
            compute(index, layer)

        super().visit(weights, order, counted)


def weight(path, array, reads) -> LayeredWeight:
    """Returns a weight that appends the bytes of each read to a list."""

    def read(parts):
        arrays = [np.array(array[part]) for part in parts]
        reads.extend(part.nbytes for part in arrays)
        return arrays

    return LayeredWeight(path, array.shape, array.dtype, read)


@dataclasses.dataclass
class Measured:
    """The losses of a run, and the bytes of its weights on each device and read."""

    losses: list[float]
    device_bytes: list[int]
    largest_read: int
    bytes_read: int


def measure(config, shape, micro_batches=1, **choices) -> Measured:
    """Runs a few steps of a prompt with streamed weights."""
    graph, parameters = dummies.prompted(config)
    blocks = {p: x for p, x in parameters.items() if "/layers/" in p}
    rest = {p: x for p, x in parameters.items() if p not in blocks}
    start = {p: jnp.array(rest.pop(p)) for p in list(rest) if "/prompt/" in p}
    batch = dummies.make_batch(config, dummies.random_rows(meshes.ROWS))
    if micro_batches > 1:
        batch = jax.tree.map(
            lambda x: x.reshape(micro_batches, -1, *x.shape[1:]), batch
        )
    reads: list[int] = []
    storage = WeightStorage(
        {p: weight(p, np.asarray(x), reads) for p, x in blocks.items()}
    )
    state, placement = TrainState.create(start, SGD, jax.random.key(0)), None
    if shape is not None:
        placement = meshes.placed(meshes.layout_of(shape, config), graph, parameters)
        storage, state = storage.on_mesh(placement), placement.put_tree(state)
        rest = {path: placement.put(path, leaf) for path, leaf in rest.items()}
        batch = placement.put_batch(batch)
    reader, losses = Counted(), []
    step = streamed_step(
        graph,
        SGD,
        storage.streamed,
        dropout=False,
        reader=reader,
        placement=placement,
        **choices,
    )
    for _ in range(STEPS):
        state, metrics = step(state, rest, batch)
        losses.append(float(metrics["loss"]))
    sizes = list(reader.bytes.values())
    return Measured(losses, sizes, max(reads), sum(reads))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "shape", "micro_batches", "recomputed"),
    sample(
        1,
        [
            ("llama", FSDP, 1, True),
            ("llama", FSDP, 2, False),
            ("t5_gated", FSDP, 2, True),
            ("t5_original", MeshShape(data=2, fsdp=2), 1, False),
            ("gpt2", MeshShape(data=1, tensor=2), 1, True),
            ("llama", MeshShape(data=1, fsdp=2, tensor=2), 2, True),
        ],
    ),
)
def test_each_device_streams_its_own_shard(family, shape, micro_batches, recomputed):
    # A vocabulary of 37 tokens is padded on the mesh.
    config = dataclasses.replace(dummies.FAMILIES[family], layers=2, vocabulary_size=37)
    choices = {"checkpoint_activation": recomputed}
    alone = measure(config, None, micro_batches, **choices)
    there = measure(config, shape, micro_batches, **choices)
    np.testing.assert_allclose(there.losses, alone.losses, rtol=1e-5)
    assert alone.losses[-1] < alone.losses[0] - 1e-3
    devices = shape.data * shape.fsdp * shape.tensor
    assert len(there.device_bytes) == devices
    shards = shape.fsdp * shape.tensor
    # Biases and norms along a split axis alone are whole on each device.
    assert max(there.device_bytes) <= 1.1 / shards * alone.device_bytes[0]
    # Nothing is read for more than the devices that need it.
    assert there.largest_read <= alone.largest_read / shards
    assert there.bytes_read <= 1.1 * alone.bytes_read


@pytest.mark.exhaustive
@pytest.mark.parametrize("action", ["evaluate", "generate", "predict"])
def test_runs_on_a_mesh_measure_and_generate_the_same(files, tmp_path, capsys, action):
    model = write_model(tmp_path / "model", dataclasses.replace(DECODER, layers=2))
    streamed = "--gin.Pretrained.weights='streamed'"
    mesh = ["--gin.Run.mesh=@MeshShape()", "--gin.MeshShape.data=-1"]
    mesh += ["--gin.MeshShape.fsdp=2"]
    logs = []
    for name, more in (("one", []), ("mesh", mesh)):
        given = files.arguments(tmp_path / name, model, **{"Run.steps": 3})
        assert main(["train", *given, streamed, *more]) == 0
        logs.append(logged(tmp_path / name))
    for actual, expected in zip(*logs, strict=True):
        for metric in {"loss", "evaluation/loss"} & expected.keys():
            np.testing.assert_allclose(actual[metric], expected[metric], rtol=1e-5)
    more = {
        "generate": ["--new_tokens", "2", "ab="],
        "predict": ["ab=", "c=", "--labels", "AB", "c"],
    }.get(action, [])
    results = []
    for weights in ("streamed", "device"):
        capsys.readouterr()
        given = [f"--gin.Pretrained.weights={weights!r}", *more]
        assert main([action, "--run", str(tmp_path / "mesh"), *given]) == 0
        results.append(capsys.readouterr().out)
    if action == "predict":  # its probabilities are printed in full
        assert_same_printed(*results)
    else:
        assert results[0] == results[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_an_output_gradient_is_pulled_back_through_the_blocks(micro_batches):
    """Compared with `jax.vjp` of the blocks, which the test runs one by one."""
    config = dataclasses.replace(dummies.LLAMA, layers=2, vocabulary_size=37)
    graph, parameters = dummies.prompted(config)
    path, name = "decoder/prompt/prompt", "decoder/layers/0/hidden"
    batch = dummies.make_batch(config, dummies.random_rows(meshes.ROWS))
    batch = jax.tree.map(jnp.asarray, batch)
    seed = jax.random.normal(jax.random.key(0), (*batch.tokens.shape, config.width))

    def first_block(prompt):
        """The model's only block is the first one, before the final norm."""
        alone = dataclasses.replace(config, layers=1)
        cut = {
            p: x[:1] if "/layers/" in p else x
            for p, x in (parameters | {path: prompt}).items()
        }
        model: Any = merge(dummies.prompted(alone)[0], cut)
        model.decoder.final_norm = None
        prefix = model.prefix()
        everywhere = jnp.arange(batch.tokens.shape[1]) + 1
        rows = jnp.broadcast_to(everywhere, batch.tokens.shape)
        whole = dataclasses.replace(batch, loss_positions=rows)
        return model.hidden(whole, prefix=prefix)

    expected, pull_back = jax.vjp(first_block, parameters[path])
    (gradient,) = pull_back(seed)
    placement = meshes.placed(meshes.layout_of(FSDP, config), graph, parameters)
    put = {p: placement.put(p, x) for p, x in parameters.items()}
    trained, blocks = {path: put.pop(path)}, [p for p in put if "/layers/" in p]
    storage = WeightStorage({p: weight(p, np.asarray(put.pop(p)), []) for p in blocks})
    if micro_batches > 1:
        batch, seed = jax.tree.map(
            lambda x: x.reshape(micro_batches, -1, *x.shape[1:]), (batch, seed)
        )
    step = OutputStep(
        graph,
        ("token_nll", name),
        placement=placement,
        streamed=storage.on_mesh(placement).streamed,
    )
    step.set_output_gradient(name, seed)
    outputs, actual = step(trained, put, placement.put_batch(batch))
    hidden = np.asarray(outputs[name]).reshape(expected.shape)
    np.testing.assert_allclose(hidden, expected, atol=1e-5)
    assert np.abs(gradient).max() > 0.1
    np.testing.assert_allclose(actual[path], gradient, rtol=1e-4, atol=1e-5)


def test_what_a_mesh_cannot_stream_is_refused(monkeypatch):
    with pytest.raises(InputError, match=r"is 'host', but Run\.mesh"):
        check_location("streamed", "host", True, [])
    check_location("streamed", "device", True, [])
    monkeypatch.setattr(processes, "count", lambda: 2)
    with pytest.raises(InputError, match="devices of several processes: give"):
        check_location("streamed", "device", True, [])
