"""Losses of a chosen and a rejected answer, against TRL and against plain formulas."""

# TRL and torch are in the `bench` extra only.
# pyright: reportMissingImports=false

import dataclasses
import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.core import parameter_groups
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError
from prompt_tuning.losses.dpo import DPO, ReferencedDPO
from prompt_tuning.losses.orpo import ORPO
from prompt_tuning.losses.preference import AnswerScores
from prompt_tuning.losses.simpo import SimPO
from prompt_tuning.models.scoring import merge_model
from prompt_tuning.settings.axis_rules import AxisRules
from prompt_tuning.settings.mesh_shape import MeshShape
from prompt_tuning.training.distillation import make_reference
from prompt_tuning.training.gradients import gradients
from tests.support import dummies
from tests.support.meshes import layout_of, placed

LENGTHS = np.array([[3, 5], [2, 2], [7, 1], [4, 6]])
DPO_LOSSES = [
    DPO(beta=0.3),
    DPO(beta=0.2, loss="robust", label_smoothing=0.2),
    DPO(beta=0.7, loss="hinge"),
    DPO(beta=0.4, loss="ipo"),
    DPO(beta=0.9, length_normalize=True),
]


class Unread:
    """A reference whose scores are given."""

    def hidden(self, student, batch):
        raise NotImplementedError

    def read_context(self, student):
        raise NotImplementedError


def draw_scores(seed: int) -> np.ndarray:
    """Log-probabilities of each token: mean -2 nats, `[4, 2]` summed by length."""
    random = np.random.default_rng(seed)
    return -LENGTHS * random.uniform(0.5, 3.5, LENGTHS.shape)


def loss_and_gradient(objective, policy, reference: Any = 0.0):
    def loss(policy):
        ratios = policy - reference
        scores = AnswerScores(ratios, ratios / LENGTHS)
        return objective.pair_losses(scores)[0].mean()

    return jax.jit(jax.value_and_grad(loss))(jnp.asarray(policy, jnp.float32))


@pytest.mark.torch
@pytest.mark.parametrize("settings", DPO_LOSSES, ids=repr)
def test_dpo_is_the_loss_of_trl(settings):
    import torch
    from trl.trainer.dpo_trainer import DPOTrainer

    policy = torch.tensor(draw_scores(1), requires_grad=True)
    reference = torch.tensor(draw_scores(2))
    # TRL's batches have the chosen answers first. A token of a row has its share.
    longest = LENGTHS.max()
    mask = torch.arange(longest) < torch.tensor(LENGTHS.T.ravel())[:, None]
    share = policy.T.reshape(-1, 1) / torch.tensor(LENGTHS.T.reshape(-1, 1))
    kind = "sigmoid_norm" if settings.length_normalize else settings.loss
    trainer = mock.MagicMock(
        model=mock.Mock(training=True),
        accelerator=mock.Mock(device="cpu", gather_for_metrics=lambda x: x),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[kind],
        loss_weights=[1.0],
        beta=settings.beta,
        label_smoothing=settings.label_smoothing,
        use_weighting=False,
    )
    zeros = torch.zeros(mask.shape)  # for its metrics
    outputs = mock.MagicMock(
        log_probs=share * mask, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
    )
    inputs = {
        "input_ids": torch.zeros((8, longest + 1), dtype=torch.long),
        "attention_mask": torch.ones((8, longest + 1)),
        "completion_mask": torch.cat([torch.zeros(8, 1), mask], 1).long(),
        "ref_chosen_logps": reference[:, 0],
        "ref_rejected_logps": reference[:, 1],
    }
    expected = DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    expected.backward()

    objective = ReferencedDPO(settings, Unread())
    loss, gradient = loss_and_gradient(
        objective, policy.detach().numpy(), reference.numpy()
    )
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, policy.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.torch
def test_orpo_and_simpo_are_the_losses_of_trl():
    import torch
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    policy = torch.tensor(draw_scores(1) / LENGTHS, requires_grad=True)
    trainer = mock.Mock(beta=0.3, accelerator=mock.Mock(device="cpu"))
    ratio = ORPOTrainer.odds_ratio_loss(trainer, policy[:, 0], policy[:, 1])[0]
    orpo = (-policy[:, 0] - ratio).mean()
    trainer = mock.Mock(
        beta=2.5,
        simpo_gamma=0.8,
        label_smoothing=0.1,
        loss_type="simpo",
        alpha=0.0,
        accelerator=mock.Mock(device="cpu"),
    )
    simpo = CPOTrainer.cpo_loss(trainer, policy[:, 0], policy[:, 1])[0].mean()
    for expected, objective in (
        (orpo, ORPO(beta=0.3)),
        (simpo, SimPO(beta=2.5, gamma=0.8, label_smoothing=0.1)),
    ):
        policy.grad = None
        expected.backward()
        loss, gradient = loss_and_gradient(objective, draw_scores(1))
        np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
        np.testing.assert_allclose(
            gradient, np.asarray(policy.grad) / LENGTHS, rtol=1e-4, atol=1e-6
        )


@pytest.mark.slow
def test_dpo_without_a_reference_is_simpo_without_a_margin():
    config = dummies.FAMILIES["llama"]
    graph, parameters = dummies.prompted(config)
    batch = jax.tree.map(jnp.asarray, pairs_of(config))
    model = merge_model(graph, parameters)
    settings = DPO(beta=0.3, length_normalize=True, reference="none")

    def refuse(context=None, *, run=None):
        raise AssertionError(f"a reference is opened: {context}, {run}")

    states = model.hidden(batch), model.output_head(), batch
    found = settings.prepare(refuse).sums(*states)
    expected = SimPO(beta=0.3, gamma=0.0).sums(*states)
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-6)


def test_label_smoothing_averages_both_labels():
    scores = AnswerScores(jnp.array([[-3.0, -5.0]]), jnp.array([[-1.0, -1.0]]))
    objective = ReferencedDPO(DPO(beta=0.5, label_smoothing=0.25), Unread())
    # -0.75 log sigmoid(1) - 0.25 log sigmoid(-1)
    np.testing.assert_allclose(objective.pair_losses(scores)[0], [0.563262], rtol=1e-5)


def pairs_of(config) -> Batch:
    """Three pairs of answers to a prompt each, and a pair that fills the batch."""
    random = np.random.default_rng(0)
    rows = []
    for given, *answers in [(4, 3, 2), (1, 5, 1), (6, 2, 2), (2, 1, 1)]:
        prompt = random.integers(3, dummies.V, given).tolist()
        rows += [
            (prompt, random.integers(3, dummies.V, size).tolist()) for size in answers
        ]
    batch = dummies.make_batch(config, rows)
    batch.loss_weights[6:] = 0
    weights = np.array([1, 0.5, 1, 0], np.float32)
    gold = np.array([0, 0, 0, -1], np.int32)
    return dataclasses.replace(batch, gold=gold, example_weights=weights)


def prepared(family):
    config = dummies.FAMILIES[family]
    graph, parameters = dummies.prompted(config)
    path = f"{dummies.PROMPT_PATHS[config.architecture]}/prompt"
    trained, frozen = parameter_groups.partition(parameters, {path: 0})
    objective = ReferencedDPO(DPO(beta=0.5), make_reference(config))
    return config, graph, trained, frozen, objective


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "t5_gated"])
def test_the_reference_is_the_frozen_model_and_the_gradient_that_of_the_formula(family):
    config, graph, trained, frozen, objective = prepared(family)
    plain_graph, _ = dummies.unprompted(config)
    batch = jax.tree.map(jnp.asarray, pairs_of(config))

    def answers(parameters, graph):
        logits = dummies.logits(parameters, batch, graph=graph)
        targets = jnp.take_along_axis(batch.targets, batch.loss_positions, axis=1)
        log_p = jnp.take_along_axis(
            jax.nn.log_softmax(logits), targets[..., None], axis=-1
        )
        return jnp.sum(log_p[..., 0] * batch.loss_weights, 1).reshape(-1, 2)

    def formula(trained):
        ratio = answers(trained | frozen, graph) - answers(frozen, plain_graph)
        losses = jnp.log1p(jnp.exp(-0.5 * (ratio[:, 0] - ratio[:, 1])))
        return jnp.sum(losses * batch.example_weights) / 2.5

    value, expected = jax.jit(jax.value_and_grad(formula))(trained)
    compute = jax.jit(functools.partial(gradients, graph, objective=objective))
    cut = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)
    for form in (batch, cut):
        gradient, sums = compute(trained, frozen, form, None)
        np.testing.assert_allclose(sums.loss / 2.5, value, rtol=1e-5)
        (path,) = gradient
        assert np.abs(expected[path]).max() > 1e-3
        np.testing.assert_allclose(gradient[path], expected[path], atol=2e-5)


@pytest.mark.slow
def test_a_mesh_has_the_gradient_of_one_device():
    config, graph, trained, frozen, objective = prepared("llama")
    batch = pairs_of(config)
    compute: Any = functools.partial(gradients, graph, objective=objective)
    expected, sums = jax.jit(compute)(trained, frozen, batch, None)
    layout = layout_of(MeshShape(data=2, tensor=2), config, AxisRules())
    placement = placed(layout, graph, trained | frozen)
    actual, sharded = jax.jit(functools.partial(compute, layout=layout))(
        placement.put_tree(trained),
        placement.put_tree(frozen),
        placement.put_batch(batch),
        None,
    )
    np.testing.assert_allclose(sharded.loss, sums.loss, rtol=1e-5)
    (path,) = expected
    np.testing.assert_allclose(actual[path], expected[path], atol=1e-5)


def test_smoothing_without_an_effect_is_refused():
    with pytest.raises(InputError, match="'hinge' does not use"):
        DPO(loss="hinge", label_smoothing=0.1)
    with pytest.raises(InputError, match=r"less than 0\.5"):
        DPO(loss="robust", label_smoothing=0.5)
