"""The same losses on any mesh, whatever is trained."""

import numpy as np
import pytest

from prompt_tuning.parallel.mesh import MeshShape
from tests import dummies, meshes, methods

CONFIGS = {
    "decoder": dummies.with_dropout(dummies.LLAMA, 0.1),
    "gpt2": dummies.with_dropout(dummies.GPT2, 0.1),
    "t5": dummies.with_dropout(dummies.T5_GATED, 0.1),
}
MESHES = {
    "one": MeshShape(data=1),
    "data 2": MeshShape(data=2),
    "fsdp 2": MeshShape(data=1, fsdp=2),
    "tensor 2": MeshShape(data=1, tensor=2),
    "data 2, tensor 2": MeshShape(data=2, tensor=2),
    "fsdp 2, tensor 4": MeshShape(data=1, fsdp=2, tensor=4),
}
METHODS = {method.name: method for method in methods.METHODS}
# One model each; `scripts/mesh_curves.py` runs all of them on all meshes.
CASES = [
    (name, families[place % len(families)])
    for place, (name, method) in enumerate(METHODS.items())
    if (families := [family for family in CONFIGS if family not in method.refused])
]


def of_method(name: str, family: str):
    """A model that a method tunes, and rows for it."""
    method, config = METHODS[name], CONFIGS[family]
    soft = 3 if name.startswith("template") else 0
    batch = meshes.batch_of(config, tasks=name.startswith("several"), soft=soft)
    return meshes.tuned(config, method), batch


@pytest.mark.parametrize("family", ["decoder", "t5"])
def test_a_soft_prompt_learns_alike_on_every_mesh(family):
    model, batch = of_method("soft prompt", family)
    alone = meshes.curve(model, batch, None)
    assert alone[-5:].mean() < alone[:5].mean()
    for name, shape in MESHES.items():
        layout = meshes.layout_of(shape, CONFIGS[family])
        found = meshes.curve(model, batch, layout)
        np.testing.assert_allclose(found, alone, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(("name", "family"), CASES[1:])
def test_every_method_learns_alike_where_everything_is_split(name, family):
    model, batch = of_method(name, family)
    alone = meshes.curve(model, batch, None)
    layout = meshes.layout_of(MESHES["fsdp 2, tensor 4"], CONFIGS[family])
    np.testing.assert_allclose(meshes.curve(model, batch, layout), alone, rtol=1e-5)
