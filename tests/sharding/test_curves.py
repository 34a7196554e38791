"""The losses are the same on any mesh, for all methods."""

import functools
import os

import numpy as np
import optax
import pytest

from prompt_tuning.core import parameter_groups
from prompt_tuning.settings.mesh_shape import MeshShape
from tests.support import dummies, meshes, methods
from tests.support.exhaustive import sample

CONFIGS = {"decoder": dummies.LLAMA, "gpt2": dummies.GPT2, "t5": dummies.T5_GATED}
# Settings of the model, not of a method; EVERY_MESH=1 runs all methods with it.
DROPOUT = 0.1
MESHES = {
    "one": MeshShape(data=1),
    "data 2": MeshShape(data=2),
    "fsdp 2": MeshShape(data=1, fsdp=2),
    "tensor 2": MeshShape(data=1, tensor=2),
    "data 2, tensor 2": MeshShape(data=2, tensor=2),
    "fsdp 2, tensor 4": MeshShape(data=1, fsdp=2, tensor=4),
}
METHODS = {method.name: method for method in methods.METHODS}
EVERYTHING = "fsdp 2, tensor 4"
CASES = [
    (name, family)
    for name, method in METHODS.items()
    for family in CONFIGS
    if family not in method.refused
]
# Some combinations of trained and sharded parameters; EVERY_MESH=1 runs all methods on
# all models and meshes.
SOME = [
    ("several tasks: add", "decoder"),
    ("projected prefix", "decoder"),
    ("prompts in encoder and decoder", "t5"),
    ("IA3", "gpt2"),
    ("LoRA", "decoder"),
]
CHOSEN, RATE = [(*case, EVERYTHING) for case in SOME], 0.0
if os.environ.get("EVERY_MESH"):
    CHOSEN = [(name, family, mesh) for name, family in CASES for mesh in MESHES]
    RATE = DROPOUT


def method_case(name: str, family: str, rate: float):
    """A model that a method tunes, and rows for it."""
    method, config = METHODS[name], dummies.with_dropout(CONFIGS[family], rate)
    soft = 3 if name.startswith("template") else 0
    batch = meshes.batch_of(config, tasks=name.startswith("several"), soft=soft)
    return meshes.tuned(config, method), batch


@functools.cache
def alone(name: str, family: str, rate: float) -> np.ndarray:
    """The loss curve on one device."""
    return meshes.curve(*method_case(name, family, rate), None)


def check(name: str, family: str, mesh: str, rate: float) -> None:
    layout = meshes.layout_of(MESHES[mesh], CONFIGS[family])
    losses = meshes.curve(*method_case(name, family, rate), layout)
    np.testing.assert_allclose(losses, alone(name, family, rate), rtol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "mesh"),
    sample(
        1,
        [
            ("decoder", "data 2, tensor 2"),
            ("decoder", EVERYTHING),
            ("t5", EVERYTHING),
        ],
    ),
)
def test_a_soft_prompt_has_the_same_losses(family, mesh):
    check("soft prompt", family, mesh, DROPOUT)


@pytest.mark.exhaustive
def test_an_optimizer_that_averages_over_the_vocabulary_ignores_padding():
    config = CONFIGS["decoder"]
    graph, parameters = dummies.prompted(config)
    model = (
        graph,
        parameters,
        [parameter_groups.ParameterGroup((".*",), parameter_groups.adafactor(0.1))],
    )
    factored = optax.adafactor(0.01, min_dim_size_to_factor=8)
    layout = meshes.layout_of(MeshShape(data=1, tensor=2), config)
    assert layout.padded_shape(("vocab", "embed"), (31, 16)) == (32, 16)
    curves = [
        meshes.curve(model, meshes.batch_of(config), mesh_layout, optimizer=factored)
        for mesh_layout in (None, layout)
    ]
    np.testing.assert_allclose(*curves, rtol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "family", "mesh"), sample(1, CHOSEN))
def test_methods_have_the_same_losses_when_fully_sharded(name, family, mesh):
    check(name, family, mesh, RATE)
