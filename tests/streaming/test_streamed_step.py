"""Compares steps that read weights layer by layer with ordinary steps."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prompt_tuning.core import parameter_groups
from prompt_tuning.core.errors import InputError
from prompt_tuning.losses.context_distillation import Distillation
from prompt_tuning.losses.token_objective import TokenObjective
from prompt_tuning.models import host_memory
from prompt_tuning.streaming.layered_weights import LayeredWeight, LayerReader
from prompt_tuning.streaming.streamed_function import StreamedFunction
from prompt_tuning.training.distillation import make_teacher
from prompt_tuning.training.gradients import gradients
from prompt_tuning.training.output_gradients import OutputStep, random_normal
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step import compile_step
from prompt_tuning.training.streamed_step import StreamedGradient, streamed_step
from tests.support import dummies, meshes, methods
from tests.support.exhaustive import sample

METHODS = {method.name: method for method in methods.METHODS}
# Rows of different length and loss weight.
SIZES = [(4, 3), (1, 5), (6, 1), (3, 3), (2, 2), (5, 2)]
SGD = optax.sgd(0.1)


class Layers:
    """Weights that count how often each of their layers is read."""

    def __init__(self, parameters):
        self.reads: list[tuple[str, int]] = []
        self.weights = {
            path: self._weight(path, np.asarray(leaf))
            for path, leaf in parameters.items()
        }

    def _weight(self, path, array):
        def read(parts):
            self.reads += [(path, part[0].start) for part in parts]
            return [np.array(array[part]) for part in parts]

        return LayeredWeight(path, array.shape, array.dtype, read)


def divided(parameters, trained):
    """Trained parameters, frozen ones, and the frozen ones of blocks and others."""
    trained = {path: parameters[path] for path in trained}
    frozen = {p: x for p, x in parameters.items() if p not in trained}
    blocks = {
        p: x for p, x in frozen.items() if "/layers/" in p and "/adapters/" not in p
    }
    rest = {path: x for path, x in frozen.items() if path not in blocks}
    return trained, frozen, blocks, rest


def prompted(config, **choices):
    graph, parameters = dummies.prompted(config, **choices)
    return graph, divided(parameters, [p for p in parameters if "/prompt/" in p])


def batch_of(config, micro_batches=1):
    batch = dummies.make_batch(config, dummies.random_rows(SIZES))
    if micro_batches == 1:
        return batch
    return jax.tree.map(lambda x: x.reshape(micro_batches, -1, *x.shape[1:]), batch)


def assert_equal(actual, expected, trained):
    """Compares losses to 1e-6 and gradients to 1e-5."""
    (gradient, sums), (usual_gradient, usual) = actual, expected
    np.testing.assert_allclose(sums.loss, usual.loss, rtol=1e-6)
    np.testing.assert_array_equal(sums.weight, usual.weight)
    assert gradient.keys() == trained.keys()
    for path in trained:
        assert np.abs(usual_gradient[path]).max() > 1e-3
        np.testing.assert_allclose(gradient[path], usual_gradient[path], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "micro_batches"),
    sample(1, [("llama", 1), ("gpt2", 2), ("t5_original", 1), ("t5_gated", 2)]),
)
def test_loss_and_gradient_equal_the_usual_steps(family, micro_batches):
    config = dataclasses.replace(dummies.FAMILIES[family], layers=3)
    graph, (trained, frozen, blocks, rest) = prompted(config)
    batch = batch_of(config, micro_batches)
    compute = jax.jit(functools.partial(gradients, graph))
    expected = compute(trained, frozen, batch, None)
    layers = Layers(blocks)
    streamed = StreamedGradient(graph, layers.weights)
    actual = streamed(trained, rest, batch, None)
    assert_equal(actual, expected, trained)
    # Each layer was read once per direction, however many micro-batches there are.
    assert len(set(layers.reads)) == sum(len(x) for x in blocks.values())
    assert len(layers.reads) == 2 * len(set(layers.reads))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "family", "rate"),
    sample(
        1,
        [
            ("dropout in a prompt", "gpt2", 0.3),
            ("deep prompt, added", "llama", 0.0),
            ("key/value prefix", "t5_gated", 0.0),
            ("prompts in encoder and decoder", "t5_gated", 0.3),
            ("LoRA and a soft prompt", "llama", 0.3),
        ],
    ),
)
def test_methods_have_the_same_updates_with_dropout_and_micro_batches(
    name, family, rate
):
    config = dummies.with_dropout(dummies.FAMILIES[family], rate)
    graph, parameters, groups = meshes.tuned(config, METHODS[name])
    labels = parameter_groups.label(parameters, groups)
    trained, frozen, blocks, rest = divided(parameters, labels)
    batch = batch_of(config, 2)
    moved = []
    for step, given in (
        (compile_step(graph, SGD, dropout=True), frozen),
        (streamed_step(graph, SGD, Layers(blocks).weights, dropout=True), rest),
    ):
        start = jax.tree.map(jnp.copy, trained)
        state = TrainState.create(start, SGD, jax.random.key(1))
        moved.append(step(state, given, batch))
    (usual, expected), (state, metrics) = moved
    assert metrics.keys() == expected.keys()
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-6)
    for path, leaf in trained.items():
        assert np.abs(usual.trained[path] - leaf).max() > 0
        # A tenth of the tolerance for gradients.
        np.testing.assert_allclose(
            state.trained[path], usual.trained[path], rtol=1e-6, atol=1e-6
        )


@pytest.mark.exhaustive
def test_another_objective_has_the_same_losses():
    objective = TokenObjective(0.01, 0.1, "average_per_sequence")
    graph, (trained, frozen, blocks, rest) = prompted(dummies.LLAMA)
    batch = batch_of(dummies.LLAMA, 2)
    compute = jax.jit(functools.partial(gradients, graph, objective=objective))
    streamed = StreamedGradient(graph, Layers(blocks).weights, objective=objective)
    actual = streamed(trained, rest, batch, None)
    assert_equal(actual, compute(trained, frozen, batch, None), trained)


@pytest.mark.exhaustive
def test_a_teacher_reads_each_layer_together_with_its_student():
    config = dataclasses.replace(dummies.LLAMA, layers=3)
    objective = Distillation(make_teacher(config, [3, 1, 4]))
    graph, (trained, frozen, blocks, rest) = prompted(config)
    batch = batch_of(config, 2)
    compute = jax.jit(functools.partial(gradients, graph, objective=objective))
    layers = Layers(blocks)
    streamed = StreamedGradient(graph, layers.weights, objective=objective)
    actual = streamed(trained, rest, batch, None)
    assert_equal(actual, compute(trained, frozen, batch, None), trained)
    assert len(layers.reads) == 2 * len(set(layers.reads))


def test_one_forward_and_one_backward_program_serve_all_layers_and_micro_batches():
    config = dataclasses.replace(dummies.LLAMA, layers=5)
    graph, (trained, _, blocks, rest) = prompted(config)
    streamed = StreamedGradient(graph, Layers(blocks).weights)
    for _ in range(2):
        streamed(trained, rest, batch_of(config, 3), None)
    (program,) = streamed._sums._programs.values()
    ((_, loop),) = program._stages
    jitted: list[Any] = [loop.forward.jitted, loop.backward.jitted]
    assert [program._cache_size() for program in jitted] == [1, 1]


def test_two_layers_are_on_the_device_at_a_time():
    config = dataclasses.replace(dummies.LLAMA, layers=6, feed_forward_width=2048)
    graph, (trained, frozen, blocks, rest) = prompted(config)
    layer = sum(leaf.nbytes for leaf in blocks.values()) / 6
    layers, batch, seen = Layers(blocks), batch_of(config), []
    # The stacks were copied above and are no longer on the device.
    frozen.clear()
    blocks.clear()
    # Referenced here, so that none of them is freed while the layers are counted.
    others = jax.live_arrays()
    before = nbytes(others)
    reader = LayerReader(
        lambda index: seen.append((index, nbytes(jax.live_arrays()) - before))
    )
    streamed = StreamedGradient(graph, layers.weights, reader=reader)
    streamed(trained, rest, batch, None)
    assert [index for index, _ in seen] == [0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0]
    # Some 60 positions of width 16 are a tenth of a layer.
    assert 1.9 * layer < max(size for _, size in seen) < 2.2 * layer
    # The last layer of a pass has no next one.
    assert seen[-1][1] < 1.2 * layer


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", sample(1, ["llama", "t5_gated"]))
def test_activations_may_stay_on_the_device_without_the_weights(family):
    # No activation has the width of a kernel.
    changes = {"layers": 3, "feed_forward_width": 20}
    config = dataclasses.replace(dummies.FAMILIES[family], **changes)
    graph, (trained, frozen, blocks, rest) = prompted(config)
    batch = batch_of(config, 2)
    compute = jax.jit(functools.partial(gradients, graph))
    layers, saved = Layers(blocks), []

    class Watched(LayerReader):
        def visit(self, weights, order, compute):
            super().visit(weights, order, compute)
            saved.append({array.shape for array in jax.live_arrays()})

    before = {array.shape for array in jax.live_arrays()}
    streamed = StreamedGradient(
        graph, layers.weights, reader=Watched(), checkpoint_activation=False
    )
    actual = streamed(trained, rest, batch, None)
    expected = compute(trained, frozen, batch, None)
    assert_equal(actual, expected, trained)
    assert len(layers.reads) == 2 * len(set(layers.reads))
    kernels = {x.shape[1:] for p, x in blocks.items() if p.endswith("kernel")}
    assert saved[0] - before
    assert kernels.isdisjoint(saved[0] - before)
    # No layer was computed again.
    ((_, loop),) = next(iter(streamed._sums._programs.values()))._stages[-1:]
    assert loop.backward_saved._compiled
    assert not loop.backward._compiled


@pytest.mark.exhaustive
def test_slices_of_several_layers_are_read_at_once():
    config = dataclasses.replace(dummies.LLAMA, layers=5)
    graph, (trained, frozen, blocks, rest) = prompted(config)
    batch = batch_of(config)
    expected = jax.jit(functools.partial(gradients, graph))(
        trained, frozen, batch, None
    )
    layers = Layers(blocks)
    reader = LayerReader(slices=2)
    streamed = StreamedGradient(graph, layers.weights, reader=reader)
    assert_equal(streamed(trained, rest, batch, None), expected, trained)
    # Three and two layers forward, then three and two from the end.
    starts = [start for path, start in layers.reads if path == min(blocks)]
    assert starts == [0, 3, 2, 0]


def nbytes(arrays):
    return sum(array.nbytes for array in arrays)


@pytest.mark.exhaustive
def test_an_encoder_without_trained_inputs_has_no_backward_pass():
    method = METHODS["prompt in the decoder alone"]
    graph, parameters, groups = meshes.tuned(dummies.T5_GATED, method)
    trained, _, blocks, rest = divided(
        parameters, parameter_groups.label(parameters, groups)
    )
    layers = Layers(blocks)
    streamed = StreamedGradient(graph, layers.weights)
    streamed(trained, rest, batch_of(dummies.T5_GATED), None)
    for path, index in set(layers.reads):
        passes = 1 if path.startswith("encoder/") else 2
        assert layers.reads.count((path, index)) == passes


def layered(array):
    return Layers({"stack": array}).weights["stack"]


def test_loops_literals_shared_values_and_slices_are_rendered():
    weights = np.arange(12, dtype=np.float32).reshape(3, 2, 2) / 10

    def function(trained, frozen, x):
        def body(carry, layer):
            weight, scale = layer
            return jnp.tanh(carry @ weight) * scale + trained["shift"], None

        return jax.lax.scan(body, x, (frozen["stack"], trained["scale"]))[0].sum()

    trained = {"scale": jnp.array([1.0, 2.0, 3.0]), "shift": jnp.array(0.5)}
    x = jnp.ones((4, 2))
    streamed = StreamedFunction(function)
    gradient, (value,) = streamed.value_and_gradient(
        trained, {"stack": layered(weights)}, [(x,)], [jnp.float32(1)]
    )
    expected, usual = jax.value_and_grad(function)(trained, {"stack": weights}, x)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for name in trained:
        np.testing.assert_allclose(gradient[name], usual[name], rtol=1e-5)
    alone = streamed.forward(trained, {"stack": layered(weights)}, x)
    np.testing.assert_allclose(alone, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda _, frozen: frozen["stack"].sum(), "read by 'reduce_sum'"),
        (
            lambda _, frozen: jax.lax.scan(
                lambda c, i: (c + frozen["stack"][i].sum(), None), 0.0, jnp.arange(3)
            )[0],
            "a loop reads all of it in each iteration",
        ),
    ],
)
def test_models_that_cannot_be_streamed_are_refused(function: Any, message):
    stack = layered(np.ones((3, 2), np.float32))
    with pytest.raises(InputError, match=message):
        StreamedFunction(function).forward({}, {"stack": stack})


def test_outputs_of_all_layers_are_collected_but_not_differentiated():
    array = np.arange(6, dtype=np.float32).reshape(3, 2)

    def function(trained, frozen):
        _, outputs = jax.lax.scan(
            lambda c, w: (c + 1.0, w * c + trained.get("shift", 0)),
            1.0,
            frozen["stack"],
        )
        return outputs.sum(1), outputs

    streamed, stack = StreamedFunction(function), {"stack": layered(array)}
    sums, outputs = streamed.forward({}, stack)
    np.testing.assert_allclose(outputs, array * [[1], [2], [3]])
    np.testing.assert_allclose(sums, [1, 10, 27])
    with pytest.raises(InputError, match="stacks an output of all layers, of shape"):
        streamed.forward({"shift": jnp.ones(2)}, stack)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", sample(1, ["llama", "t5_gated"]))
def test_blocks_copy_their_weights_from_pinned_memory(family):
    config = dataclasses.replace(dummies.FAMILIES[family], feed_forward_width=20)
    graph, (trained, frozen, blocks, rest) = prompted(config, length=5)
    pinned = rest | {
        p: host_memory.put_in_pinned_memory(np.asarray(x)) for p, x in blocks.items()
    }
    assert all(pinned[path].sharding.memory_kind == "pinned_host" for path in blocks)
    batch = batch_of(config, 2)
    compute = jax.jit(functools.partial(gradients, graph))
    expected = compute(trained, frozen, batch, None)
    assert_equal(compute(trained, pinned, batch, None), expected, trained)
    # No array of a kernel's shape is saved for the backward pass, on host or device.
    traced = jax.make_jaxpr(functools.partial(gradients, graph))
    text = str(traced(trained, pinned, batch, None))
    kernels = {x.shape for path, x in blocks.items() if path.endswith("kernel")}
    kept_shapes = {shape for shape in kernels if is_stacked(text, shape)}
    assert not kept_shapes
    assert "<host>[" in text


def is_stacked(text, shape):
    """Returns whether a traced program stacks an array of this shape on the device."""
    return f":f32[{','.join(map(str, shape))}]" in text


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", sample(1, [1, 2]))
def test_named_outputs_and_their_gradients_equal_the_usual_ones(micro_batches):
    config = dataclasses.replace(dummies.LLAMA, layers=2)
    graph, (trained, frozen, blocks, rest) = prompted(config)
    batch = jax.tree.map(jnp.asarray, batch_of(config, micro_batches))
    names = ("logits", "decoder/layers/1/hidden")
    usual, streamed = OutputStep(graph, names), Layers(blocks)
    shapes = usual.shapes(trained, frozen, batch)
    given = random_normal(shapes, batch, jax.random.key(0))
    outputs, expected = usual(trained, frozen, batch, given)
    step = OutputStep(graph, names, streamed=streamed.weights)
    assert step.shapes(trained, rest, batch) == shapes
    actual, gradient = step(trained, rest, batch, given)
    for name in names:
        np.testing.assert_allclose(actual[name], outputs[name], atol=1e-5)
    for path, leaf in expected.items():
        assert np.abs(leaf).max() > 0.1
        np.testing.assert_allclose(gradient[path], leaf, rtol=1e-4, atol=1e-5)
    assert len(streamed.reads) == 2 * len(set(streamed.reads))
