"""Trained weights, gradients and optimizer state in host memory."""

import dataclasses
import shutil
from concurrent.futures import ThreadPoolExecutor, wait

import jax
import numpy as np
import optax
import pytest

from prompt_tuning.checkpoints.run_store.checkpoint_names import FOLDER
from prompt_tuning.cli.main import main
from prompt_tuning.core import parameter_groups
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.streaming import compiled_segments, layered_weights
from prompt_tuning.streaming.layered_weights import LayerReader
from prompt_tuning.training.host_optimizer import HostOptimizer
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step import compile_step
from prompt_tuning.training.streamed_step import streamed_step
from tests.support import dummies
from tests.support.printed import assert_same_printed
from tests.support.small_runs import DECODER, logged, write_model

SIZES = [(4, 3), (1, 5), (6, 1), (3, 3)]
STEPS = 5


def groups_of(optimizer: optax.GradientTransformation):
    return [parameter_groups.ParameterGroup((".*",), optimizer)]


def batch_of(config, micro_batches):
    batch = dummies.make_batch(config, dummies.random_rows(SIZES))
    if micro_batches == 1:
        return batch
    return jax.tree.map(lambda x: x.reshape(micro_batches, -1, *x.shape[1:]), batch)


def host_step(graph, parameters: Parameters, optimizer, reader=None):
    """Returns a step with everything but the prompt in host memory, and its state."""
    groups = groups_of(optimizer)
    labels = parameter_groups.label(parameters, groups)

    def optimizer_of(paths):
        return parameter_groups.group_optimizer(groups, {p: labels[p] for p in paths})

    here = {p: "/layers/" in p for p in parameters if "/prompt/" not in p}
    host = HostOptimizer(here, optimizer_of)
    trained = {
        p: np.array(x, np.float32) if p in here else x for p, x in parameters.items()
    }
    there = optimizer_of([p for p in parameters if p not in here])
    step = streamed_step(graph, there, {}, dropout=False, reader=reader, host=host)
    zero = jax.numpy.zeros((), jax.numpy.int32)
    return step, TrainState(trained, host.init(trained), zero, jax.random.key(1))


class EagerExecutor(ThreadPoolExecutor):
    """An executor whose work is done when `submit` returns.

    The next layer is then always on the device while one is computed, however slow
    the machine's other threads are.
    """

    def submit(self, fn, /, *args, **kwargs):
        future = super().submit(fn, *args, **kwargs)
        wait([future])
        return future


@pytest.mark.slow
@pytest.mark.parametrize(("family", "micro_batches"), [("llama", 2)])
def test_five_steps_of_full_tuning_equal_those_on_the_device(family, micro_batches):
    config = dataclasses.replace(dummies.FAMILIES[family], layers=3)
    graph, parameters = dummies.prompted(config)
    batch = batch_of(config, micro_batches)
    optimizer = optax.adamw(1e-3, eps=1e-3)
    start = {path: np.array(leaf) for path, leaf in parameters.items()}
    step, state = host_step(graph, jax.tree.map(jax.numpy.array, start), optimizer)
    usual = compile_step(graph, optimizer, dropout=False)
    there = TrainState.create(parameters, optimizer, jax.random.key(1))
    for _ in range(STEPS):
        state, metrics = step(state, {}, batch)
        there, expected = usual(there, {}, batch)
        for name in expected:
            np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5)
    assert int(state.step) == STEPS
    for path, leaf in there.trained.items():
        assert isinstance(state.trained[path], np.ndarray) == ("/prompt/" not in path)
        assert np.abs(leaf - start[path]).max() > 1e-4
        np.testing.assert_allclose(state.trained[path], leaf, atol=1e-5)


def test_three_layers_and_activations_are_on_the_device_at_a_time(monkeypatch):
    config = dataclasses.replace(dummies.LLAMA, layers=6, feed_forward_width=2048)
    graph, parameters = dummies.prompted(config)
    layer = sum(x.nbytes for p, x in parameters.items() if "/layers/" in p) / 6
    batch, seen = batch_of(config, 2), []
    reader = LayerReader(lambda _: seen.append(new_bytes()))
    step, state = host_step(graph, parameters, optax.adamw(1e-3), reader)
    parameters.clear()
    # What other tests left may be collected meanwhile; kept, it is not counted.
    kept = jax.live_arrays()
    known = set(map(id, kept))

    def new_bytes():
        return sum(x.nbytes for x in jax.live_arrays() if id(x) not in known)

    call = compiled_segments.CompiledOnce.__call__

    def measured(*arguments):
        # While the gradient of a layer's weights is on the device, too.
        outputs = jax.block_until_ready(call(*arguments))
        seen.append(new_bytes())
        return outputs

    monkeypatch.setattr(compiled_segments.CompiledOnce, "__call__", measured)
    monkeypatch.setattr(layered_weights, "ThreadPoolExecutor", EagerExecutor)
    step(state, {}, batch)
    assert 2.5 * layer < max(seen) < 3.1 * layer


EVERYTHING = (
    "--gin.Run.groups=[@ParameterGroup()]",
    "--gin.ParameterGroup.regexes=['.*']",
    "--gin.ParameterGroup.optimizer=@adamw()",
    "--gin.adamw.learning_rate=1e-3",
)
HOST = (
    "--gin.Pretrained.weights='streamed'",
    "--gin.Pretrained.trained_weights='host'",
)


@pytest.mark.exhaustive
def test_a_run_on_the_host_learns_resumes_and_is_measured(files, tmp_path, capsys):
    model = write_model(tmp_path / "model", dataclasses.replace(DECODER, layers=2))
    for name, location in (("device", ()), ("host", HOST)):
        given = files.arguments(tmp_path / name, model)
        assert main(["train", *given, *EVERYTHING, *location]) == 0
    for actual, expected in zip(
        logged(tmp_path / "host"), logged(tmp_path / "device"), strict=True
    ):
        for name in {"loss", "gradient_norm", "evaluation/loss"} & expected.keys():
            np.testing.assert_allclose(actual[name], expected[name], rtol=1e-5)
    last = tmp_path / "host" / FOLDER / "checkpoint_6"
    first = {file.name: file.read_bytes() for file in last.glob("*.np?")}
    assert len(first) > 5
    shutil.rmtree(last)
    given = files.arguments(tmp_path / "host", model)
    assert main(["train", *given, *EVERYTHING, *HOST]) == 0
    assert {file.name: file.read_bytes() for file in last.glob("*.np?")} == first
    capsys.readouterr()
    tables = []
    for name in ("host", "device"):
        assert main(["evaluate", "--run", str(tmp_path / name)]) == 0
        tables.append(capsys.readouterr().out)
    assert_same_printed(*tables)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (EVERYTHING + HOST[1:], "so give --gin.Pretrained.weights='\"streamed\"'"),
        (EVERYTHING + HOST[:1], "to train weights in host memory, give"),
    ],
)
def test_settings_that_contradict_host_memory_are_refused(
    files, tmp_path, capsys, arguments, message
):
    assert main(["train", *files.arguments(tmp_path / "run"), *arguments]) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    "optimizer",
    [parameter_groups.adafactor(0.3), parameter_groups.adamw(1e-3, clip_norm=1.0)],
    ids=["adafactor", "clipped norm"],
)
def test_optimizers_that_update_layers_together_are_refused(optimizer):
    with pytest.raises(InputError, match="does not update each number alone"):
        HostOptimizer({"decoder/layers/kernel": True}, lambda _: optimizer)
