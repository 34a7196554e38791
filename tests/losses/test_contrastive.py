"""The contrastive loss is the formula in torch, also where devices divide the batch."""

# torch is only in the `bench` extra.
# pyright: reportMissingImports=false

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.batching.batch_plan import PlannedBatch
from prompt_tuning.data.batching.batches import build_batch
from prompt_tuning.data.examples.contrastive_examples import ContrastiveExamples
from prompt_tuning.losses.contrastive import Contrastive
from prompt_tuning.settings.mesh_shape import MeshShape
from prompt_tuning.training.gradients import gradients
from tests.support import dummies, meshes

TEXTS = [
    [[4, 5], [6, 7, 8], [9]],
    [[10, 11, 12], [5, 4], [3, 3]],
    [[7], [8, 8], [9, 2, 1, 4]],
    [[13, 14], [14], [15, 16]],
]
PATH = "decoder/prompt/prompt"


def batch_of(texts, pooling="mean", filling=0):
    examples = ContrastiveExamples(texts, pooling)
    numbers = np.array([*range(len(texts)), *[-1] * filling])
    length, positions = 5, int(examples.weight_counts.max())
    planned = PlannedBatch(numbers, length, length, positions, same_tokens=True)
    return jax.tree.map(jnp.asarray, build_batch(examples, planned, 0))


def loss_gradient(model, batch, objective, layout=None):
    graph, parameters = model
    trained = {PATH: parameters[PATH]}
    frozen = {path: x for path, x in parameters.items() if path != PATH}

    @jax.jit
    def compute(trained, frozen, batch):
        return gradients(graph, trained, frozen, batch, None, objective, layout)

    gradient, sums = compute(trained, frozen, batch)
    return float(sums.loss / sums.weight), gradient[PATH]


@pytest.mark.torch
@pytest.mark.parametrize("filling", [0, 2])
def test_loss_and_gradient_are_those_of_torch(filling):
    import torch

    random = np.random.default_rng(0)
    batch, objective = batch_of(TEXTS, filling=filling), Contrastive(temperature=0.2)
    shape = (*batch.loss_weights.shape, 6)
    hidden = random.normal(size=shape).astype(np.float32)

    def mean(hidden):
        sums = objective.sums(hidden, jnp.zeros((2, 6)), batch)
        return sums.loss / objective.divisor(batch)

    ours, gradient = jax.value_and_grad(mean)(jnp.asarray(hidden))
    states = torch.tensor(hidden, requires_grad=True)
    weights = torch.tensor(batch.loss_weights)[: 3 * len(TEXTS), :, None]
    texts = (states[: 3 * len(TEXTS)] * weights).sum(1) / weights.sum(1)
    texts = torch.nn.functional.normalize(texts).reshape(len(TEXTS), 3, 6)
    # Sentence Transformers has all positives first, and then all negatives.
    candidates = torch.cat([texts[:, 1], texts[:, 2]])
    scores = texts[:, 0] @ candidates.T / 0.2
    loss = torch.nn.functional.cross_entropy(scores, torch.arange(len(TEXTS)))
    loss.backward()
    np.testing.assert_allclose(ours, loss.item(), rtol=1e-5)
    assert states.grad is not None
    np.testing.assert_allclose(gradient, states.grad.numpy(), atol=1e-6)


@pytest.mark.slow
def test_devices_see_the_candidates_of_all():
    config = dataclasses.replace(dummies.LLAMA)
    model, batch = dummies.prompted(config), batch_of(TEXTS)
    layout = meshes.layout_of(MeshShape(data=2, tensor=2), config)
    placement = meshes.placed(layout, *model)
    put = {path: placement.put(path, leaf) for path, leaf in model[1].items()}
    objective = Contrastive(temperature=0.2)
    expected, gradient = loss_gradient(model, batch, objective)
    given = (model[0], put), placement.put_batch(batch), objective, layout
    actual, theirs = loss_gradient(*given)
    assert np.abs(gradient).max() > 1e-3
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    np.testing.assert_allclose(theirs, gradient, atol=1e-5)


def test_a_micro_batch_of_filling_adds_nothing():
    batch = batch_of(TEXTS, filling=len(TEXTS))
    filling = jax.tree.map(lambda leaf: np.split(leaf, 2)[1], batch)

    def loss(hidden):
        return Contrastive().sums(hidden, jnp.zeros((2, 6)), filling).loss

    hidden = jnp.ones((*filling.loss_weights.shape, 6))
    value, gradient = jax.value_and_grad(loss)(hidden)
    assert value == 0 and not gradient.any()


def test_a_text_is_pooled_by_the_states_that_are_asked_for():
    counts = {"mean": [2, 3, 1], "last": [1] * 3, "first": [1] * 3}
    first = {"mean": [1, 1, 1], "last": [2, 3, 1], "first": [1, 1, 1]}
    for pooling, expected in counts.items():
        batch = batch_of(TEXTS[:1], pooling)
        np.testing.assert_array_equal(batch.loss_weights.sum(1), expected)
        np.testing.assert_array_equal(batch.loss_positions[:, 0], first[pooling])


def test_models_without_vectors_of_texts_are_refused():
    with pytest.raises(InputError, match="a model of a single stack"):
        Contrastive().check_model(dummies.T5_GATED)
