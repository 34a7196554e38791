"""Every choice that families make in the blocks gives the same gradients on a mesh."""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from prompt_tuning.core import parameter_groups
from prompt_tuning.families.hf_folder import read_config
from prompt_tuning.prompts.low_rank_adapters import LoRA
from prompt_tuning.settings.mesh_shape import MeshShape
from prompt_tuning.training import output_gradients
from prompt_tuning.training.output_gradients import OutputStep
from tests.prompts.test_state_prefix import with_prefix
from tests.support import dummies, meshes
from tests.support.exhaustive import sample

ROUNDING = 5e-5
"""Relative to a gradient's largest number; rows split over devices differ by 2e-5."""
FIXTURES = Path(__file__).parents[1] / "fixtures/families"
TENSOR = MeshShape(data=2, tensor=2)
CASES = [
    ("olmo2", TENSOR),
    ("gpt_neox", TENSOR),
    ("olmo2", MeshShape(data=1, fsdp=2, tensor=2)),
    # More devices along `tensor` than key/value heads.
    ("olmo2", MeshShape(data=1, tensor=4)),
    ("qwen3", TENSOR),
    ("qwen3", MeshShape(data=1, tensor=4)),
    ("gemma3_text", TENSOR),
    ("granite", TENSOR),
    ("umt5", TENSOR),
    # A norm with a scale for each head; a bias of the head; linear biases; experts.
    ("cohere", TENSOR),
    ("cohere", MeshShape(data=1, tensor=4)),
    ("phi", TENSOR),
    ("phi", MeshShape(data=1, fsdp=4)),
    ("bloom", TENSOR),
    ("bart", TENSOR),
    ("gemma2", TENSOR),
    ("mixtral", TENSOR),
    # Sinks, and experts with biases.
    ("gpt_oss", TENSOR),
    ("qwen2_moe", MeshShape(data=1, fsdp=2, tensor=2)),
    # Layers without attention.
    ("lfm2", TENSOR),
    ("lfm2", MeshShape(data=1, fsdp=4)),
    ("granitemoehybrid", TENSOR),
    ("granitemoehybrid_dense", MeshShape(data=1, fsdp=4)),
    # Both mixers in a layer, and no attention.
    *((name, TENSOR) for name in ("falcon_h1", "mamba2", "jamba", "minimax")),
    # Layers of one part, and experts without gates.
    ("nemotron_h", TENSOR),
    # Norms of rotated queries and keys, and a shared expert.
    ("hunyuan_v1_moe", TENSOR),
    # Chunks of attention, and experts whose inputs are weighed.
    ("llama4_text", TENSOR),
    # Heads of two sizes; keys, values and inputs that layers share.
    ("gemma4_text", TENSOR),
    ("gemma4", TENSOR),
    ("gemma4_experts", TENSOR),
    # Vectors of relative positions that all devices project.
    ("deberta-v2", TENSOR),
    # Compressed vectors, which devices share.
    ("deepseek_v3", TENSOR),
    ("deepseek_v3_plain", MeshShape(data=1, fsdp=2, tensor=2)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "shape"), sample(1, CASES))
def test_losses_and_all_gradients_equal_those_on_one_device(family, shape):
    config = read_config(FIXTURES / family / "base")
    experts = [LoRA(regexes=[".*/experts/.*"])] if config.experts else []
    graph, parameters = dummies.prompted(config, adapters=experts)
    everything = dict.fromkeys(parameters, 0)
    trained, frozen = parameter_groups.partition(parameters, everything)
    rows = dummies.random_rows(meshes.ROWS, vocabulary_size=config.vocabulary_size)
    batch = dummies.make_batch(config, rows)
    batch = jax.tree.map(lambda array: np.stack([array]), batch)
    step = OutputStep(graph, ("token_nll",))
    shapes = step.shapes(trained, frozen, batch)
    given = output_gradients.random_normal(shapes, batch, jax.random.key(0))
    expected, gradient = step(trained, frozen, batch, given)

    placement = meshes.placed(meshes.layout_of(shape, config), graph, parameters)
    put = {name: placement.put(name, leaf) for name, leaf in parameters.items()}
    actual, theirs = OutputStep(graph, ("token_nll",), placement=placement)(
        put, {}, placement.put_batch(batch), given
    )
    np.testing.assert_allclose(
        actual["token_nll"], expected["token_nll"], rtol=1e-5, atol=1e-5
    )
    [prompt] = (leaf for path, leaf in gradient.items() if "/prompt/" in path)
    assert np.abs(prompt).max() > 0.01  # else equal gradients would mean little
    for path, leaf in placement.replicate(theirs).items():
        if config.positions != "rotary" and path.endswith("key/bias"):
            continue  # the softmax does not depend on it: the gradient is rounding
        largest = np.abs(gradient[path]).max()
        np.testing.assert_allclose(
            leaf, gradient[path], atol=ROUNDING * largest, err_msg=path
        )


CURVES = {
    "data 2, tensor 2": TENSOR,
    "fsdp 4": MeshShape(data=1, fsdp=4),
}
HYBRID = {"lfm2", "granitemoehybrid", "falcon_h1", "mamba2", "jamba", "minimax"}
STEEP = {"qwen3_5", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"}
"""Fixtures whose losses jump; small models with the delta rule are tested instead."""
FAMILIES = sorted(
    ({*sorted(path.name for path in FIXTURES.iterdir())[::3]} | HYBRID) - STEEP
)
"""A third of the families, with each mixer: the others have the same layers."""
TWO_LAYERS = {"layers": 2, "recurrent_layers": (0,)}
DELTA, STATES, SCAN, LIGHTNING = (
    dataclasses.replace(config, **TWO_LAYERS)
    for config in (dummies.QWEN3_5, dummies.GRANITE4, dummies.JAMBA, dummies.MINIMAX)
)
ONE_KEY = {"recurrent_key_heads": 1}
MEMORIES = {
    "delta": (DELTA, 2),
    "states, state prefix": (STATES, 2),
    "scan": (SCAN, 2),
    "lightning": (LIGHTNING, 2),
    "delta, one key head": (dataclasses.replace(DELTA, **ONE_KEY), 2),
    "states, one key head": (dataclasses.replace(STATES, **ONE_KEY), 2),
    # Devices that do not divide the key heads compute all heads.
    "delta, undivided": (DELTA, 4),
}
"""Models, and numbers of devices along `tensor`."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_twenty_steps_have_the_losses_of_one_device(family):
    config = read_config(FIXTURES / family / "base")
    graph, parameters = dummies.prompted(config)
    group = parameter_groups.ParameterGroup((".*/prompt/.*",), meshes.DESCENT)
    rows = dummies.random_rows(meshes.ROWS, vocabulary_size=config.vocabulary_size)
    model, batch = (graph, parameters, [group]), dummies.make_batch(config, rows)
    # Larger steps let some losses rise, and rounding errors with them. Gemma's fixtures
    # have losses above 10 and steep gradients.
    optimizer = optax.sgd(0.001 if "gemma" in family else 0.1)
    curve = functools.partial(meshes.curve, model, batch, optimizer=optimizer)
    alone = curve(None)
    assert len(alone) == 20 and np.abs(np.diff(alone)).max() > 1e-4
    for name, shape in CURVES.items():
        losses = curve(meshes.layout_of(shape, config))
        np.testing.assert_allclose(losses, alone, rtol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sample(4, MEMORIES))
def test_heads_of_memories_are_divided_among_devices(name):
    config, devices = MEMORIES[name]
    prompted = with_prefix if "prefix" in name else dummies.prompted
    graph, parameters = prompted(config)
    group = parameter_groups.ParameterGroup((".*/prompt/.*",), meshes.DESCENT)
    rows = dummies.random_rows(meshes.ROWS, vocabulary_size=config.vocabulary_size)
    model, batch = (graph, parameters, [group]), dummies.make_batch(config, rows)
    # Larger steps let losses of the delta rule rise, and rounding errors with them.
    curve = functools.partial(meshes.curve, model, batch, optimizer=optax.sgd(0.005))
    layout = meshes.layout_of(MeshShape(data=1, tensor=devices), config)
    placement = meshes.placed(layout, graph, parameters)
    path = f"decoder/layers/{config.recurrence}/value/kernel"
    shares = 1 if "undivided" in name else devices
    shard = placement.put(path, parameters[path]).addressable_shards[0]
    assert shard.data.size * shares == parameters[path].size
    alone = curve(None)
    assert np.ptp(alone) > 1e-3
    np.testing.assert_allclose(curve(layout), alone, rtol=1e-5)
    # The rows of the other memories: `test_twenty_steps_have_the_losses_of_one_device`.
    if name == "delta":
        rows = meshes.layout_of(MeshShape(data=2, fsdp=2), config)
        np.testing.assert_allclose(curve(rows), alone, rtol=1e-5)
