"""Named outputs and their gradients on meshes of host devices."""

import dataclasses

import jax
import numpy as np
import pytest

from prompt_tuning.core import parameter_groups
from prompt_tuning.core.errors import InputError
from prompt_tuning.settings.mesh_shape import MeshShape
from prompt_tuning.training import output_gradients
from prompt_tuning.training.output_gradients import OutputStep
from tests.support import dummies, meshes
from tests.support.exhaustive import sample

# A vocabulary of 37 tokens cannot be divided evenly.
CASES = [("llama", MeshShape(fsdp=2, tensor=2)), ("t5_gated", MeshShape(data=2))]


def prepared(family):
    """Micro-batches of unequal rows, for a model whose embedding table is trained."""
    config = dataclasses.replace(dummies.FAMILIES[family], vocabulary_size=37)
    graph, parameters = dummies.prompted(config)
    path = f"{dummies.PROMPT_PATHS[config.architecture]}/prompt"
    labels = {path: 0, "token_embedder/embedding": 0}
    batches = [
        dummies.make_batch(config, dummies.random_rows(meshes.ROWS, seed))
        for seed in range(2)
    ]
    batch = jax.tree.map(lambda *arrays: np.stack(arrays), *batches)
    return config, graph, parameter_groups.partition(parameters, labels), batch


@pytest.mark.exhaustive
@pytest.mark.parametrize("family, shape", sample(1, CASES), ids=["decoder", "t5"])
def test_outputs_and_their_gradients_equal_those_on_one_device(family, shape):
    config, graph, (trained, frozen), batch = prepared(family)
    names = ("token_nll", "hidden", "logits", "prompt_norm")
    names += ("decoder/layers/0/hidden", "decoder/layers/1/self_attention")
    step = OutputStep(graph, names)
    shapes = step.shapes(trained, frozen, batch)
    given = output_gradients.random_normal(shapes, batch, jax.random.key(0))
    actual, gradient = step(trained, frozen, batch, given)

    placement = meshes.placed(meshes.layout_of(shape, config), graph, trained | frozen)
    divided = OutputStep(graph, names, placement=placement)
    put = {path: placement.put(path, leaf) for path, leaf in (trained | frozen).items()}
    arguments = (
        {path: put[path] for path in trained},
        {path: put[path] for path in frozen},
        placement.put_batch(batch),
    )
    assert divided.shapes(*arguments) == shapes
    other, theirs = divided(*arguments, given)
    for name, array in actual.items():
        np.testing.assert_allclose(other[name], array, atol=1e-5, err_msg=name)
    assert theirs.keys() == gradient.keys()
    for path, leaf in placement.replicate(theirs).items():
        assert np.abs(leaf).max() > 0.1
        np.testing.assert_allclose(leaf, gradient[path], rtol=1e-5, atol=2e-5)


def test_custom_outputs_need_one_device():
    config, graph, (trained, frozen), _ = prepared("llama")
    layout = meshes.layout_of(MeshShape(), config)
    placement = meshes.placed(layout, graph, trained | frozen)
    with pytest.raises(InputError, match="use one device"):
        OutputStep(graph, (), lambda *_: {}, placement)
