"""Any mesh ends with the same prompt; in float32 only rounding differs.

In float32 the results differ by up to 3e-6 after twenty steps of Adafactor: it divides
by a gradient's magnitude, which amplifies the rounding of small gradients. The same
steps in float64 exclude other differences.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.core import parameter_groups
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.settings.mesh_shape import MeshShape
from tests.support import dummies, meshes
from tests.support.exhaustive import sample

STEPS = 20
PROMPTS = [
    parameter_groups.ParameterGroup((".*/prompt/.*",), parameter_groups.adafactor(0.3))
]
CONFIGS = {
    name: dummies.with_dropout(dummies.FAMILIES[name], 0.1)
    for name in ("llama", "t5_gated")
}
MESHES = {
    "data 2": MeshShape(data=2),
    "fsdp 2": MeshShape(data=1, fsdp=2),
    "tensor 2": MeshShape(data=1, tensor=2),
    "data 2, tensor 2": MeshShape(data=2, tensor=2),
    "fsdp 2, tensor 4": MeshShape(data=1, fsdp=2, tensor=4),
}
# EVERY_MESH=1 runs both models on all meshes.
CHOSEN = [("llama", "data 2"), ("llama", "fsdp 2, tensor 4")]
if os.environ.get("EVERY_MESH"):
    CHOSEN = [(family, mesh) for family in CONFIGS for mesh in MESHES]


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Computes everything in float64, even what the library casts to float32."""
    monkeypatch.setattr(jnp, "float32", jnp.float64)
    monkeypatch.setattr(ModelConfig, "dtype", jnp.dtype("float64"))
    with jax.enable_x64(True):
        yield


def final_prompt(family: str, shape: MeshShape | None) -> np.ndarray:
    """The prompt after all steps with dropout, from a fixed start.

    Args:
      family: family of the model.
      shape: shape of the mesh; None for one device without a mesh.
    """
    config = CONFIGS[family]
    graph, drawn = dummies.prompted(config)
    parameters = {path: jnp.asarray(x, float) for path, x in drawn.items()}
    layout = None if shape is None else meshes.layout_of(shape, config)
    model = graph, parameters, PROMPTS
    step, given = meshes.begun(model, meshes.batch_of(config), layout)

    @jax.jit
    def run(state, frozen, batch):
        return jax.lax.fori_loop(
            0, STEPS, lambda _, s: step(s, frozen, batch)[0], state
        )

    (prompt,) = run(*given).trained.values()
    return np.asarray(prompt)


@functools.cache
def alone(family: str) -> np.ndarray:
    """Trains the prompt on one device."""
    return final_prompt(family, None)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "name"), sample(1, CHOSEN))
def test_any_split_ends_with_the_prompt_of_one_device(family, name):
    actual, expected = final_prompt(family, MESHES[name]), alone(family)
    assert actual.dtype == expected.dtype == np.float64
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-9)
