"""The loss of sampled answers and their advantages, against TRL."""

# TRL and torch are in the `bench` extra only.
# pyright: reportMissingImports=false

import dataclasses
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.core.batch import Batch
from prompt_tuning.losses.grpo import GRPO, SAMPLER_LOGPROBS, GroupPolicy
from prompt_tuning.losses.output_head import OutputHead
from prompt_tuning.training.rollouts.answer_groups import group_advantages

ROWS, LENGTH, WIDTH, VOCABULARY, LONGEST = 6, 5, 8, 11, 7
VARIANTS = [
    # settings, TRL's name of the average, masked answers
    (GRPO(), "dapo", ()),
    (GRPO(clip=0.1, clip_above=0.3, beta=0.2), "dapo", (1,)),
    (GRPO(average="sequence"), "grpo", ()),
    (GRPO(average="sequence", beta=0.1), "grpo", (2,)),
    (GRPO(average="constant"), "dr_grpo", (0,)),
    (GRPO(ratio="sequence", average="sequence", clip=0.05), "grpo", ()),
    (GRPO(ratio="sequence", average="token", beta=0.3), "dapo", ()),
]


class GivenStates:
    """A reference whose hidden states are given."""

    def __init__(self, states: np.ndarray):
        self._states = states

    def hidden(self, student, batch):
        return jnp.asarray(self._states)

    def read_context(self, student):
        return {}


def draw_samples(masked=()) -> SimpleNamespace:
    """Hidden states and answers of several lengths; the sampler differs a little."""
    random = np.random.default_rng(3)

    def normal(*shape, scale=1.0):
        return (scale * random.normal(size=shape)).astype(np.float32)

    lengths = random.integers(1, LENGTH + 1, ROWS)
    lengths[0] = LENGTH
    mask = (np.arange(LENGTH) < lengths[:, None]).astype(np.float32)
    mask[list(masked)] = 0
    return SimpleNamespace(
        hidden=normal(ROWS, LENGTH, WIDTH),
        reference=normal(ROWS, LENGTH, WIDTH),
        kernel=normal(VOCABULARY, WIDTH),
        bias=normal(VOCABULARY),
        noise=normal(ROWS, LENGTH, scale=0.3),
        targets=random.integers(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32),
        advantages=normal(ROWS, scale=1.0),
        mask=mask,
    )


def trl_loss(samples, settings, average: str, temperature: float):
    """Loss and gradient of hidden states by `GRPOTrainer._compute_loss`."""
    import torch
    from trl.trainer.grpo_trainer import GRPOTrainer

    def logps(states):
        logits = states @ torch.tensor(samples.kernel).T + torch.tensor(samples.bias)
        chosen = torch.tensor(samples.targets).long()[..., None]
        return (logits / temperature).log_softmax(-1).gather(-1, chosen)[..., 0]

    hidden = torch.tensor(samples.hidden, requires_grad=True)
    policy, mask = logps(hidden), torch.tensor(samples.mask)
    above = settings.clip if settings.clip_above is None else settings.clip_above
    trainer = mock.MagicMock(
        model=mock.Mock(training=True),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=settings.ratio,
        beta=settings.beta,
        loss_type=average,
        epsilon_low=settings.clip,
        epsilon_high=above,
        args=mock.Mock(
            use_bias_correction_kl=False, delta=None, steps_per_generation=1
        ),
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=LONGEST,
        _entropy_bonus_enabled=False,
    )
    trainer.accelerator = mock.Mock(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
    )
    zeros = torch.zeros(mask.shape)
    trainer._get_per_token_logps_and_entropies.return_value = (policy, zeros, None)
    inputs = {
        "prompt_ids": torch.zeros((ROWS, 1), dtype=torch.long),
        "prompt_mask": torch.ones((ROWS, 1)),
        "completion_ids": torch.tensor(samples.targets).long(),
        "completion_mask": mask,
        "advantages": torch.tensor(samples.advantages),
        "old_per_token_logps": policy.detach() + torch.tensor(samples.noise),
        "ref_per_token_logps": logps(torch.tensor(samples.reference)),
        "num_items_in_batch": mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    sampler = inputs["old_per_token_logps"].numpy()
    return loss.item(), hidden.grad.numpy(), sampler


def batch_of(samples, sampler) -> Batch:
    """The same answers as rows; their padding has other numbers than zeros."""
    advantages = np.broadcast_to(samples.advantages[:, None], samples.mask.shape)
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
    return Batch(
        tokens=samples.targets,
        lengths=np.full(ROWS, LENGTH, np.int32),
        targets=samples.targets,
        loss_positions=positions,
        loss_weights=samples.mask,
        prefix_lengths=np.zeros(ROWS, np.int32),
        real_rows=np.ones(ROWS, np.int32),
        columns={"advantages": advantages, SAMPLER_LOGPROBS: sampler},
    )


@pytest.mark.torch
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("settings", "average", "masked"), VARIANTS, ids=repr)
def test_loss_and_gradient_are_those_of_trl(settings, average, masked, temperature):
    samples = draw_samples(masked)
    expected, gradient, sampler = trl_loss(samples, settings, average, temperature)
    reference = GivenStates(samples.reference) if settings.beta else None
    objective = GroupPolicy(settings, reference).drawn(temperature, LONGEST)
    head = OutputHead(jnp.asarray(samples.kernel), jnp.asarray(samples.bias))
    batch = batch_of(samples, sampler)

    def loss(hidden):
        return objective.sums(hidden, head, batch, {}).loss / objective.divisor(batch)

    found, own = jax.value_and_grad(loss)(jnp.asarray(samples.hidden))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(own, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.torch
def test_advantages_are_those_of_trl():
    import torch
    from trl.trainer.utils import nanstd

    rewards = np.random.default_rng(0).normal(size=(4, 6))
    rewards[2] = 0.1
    table = torch.tensor(rewards)
    centered = table - table.nanmean(1, keepdim=True)
    expected = centered / (nanstd(table, dim=1)[:, None] + 1e-4)
    found = group_advantages(rewards, "deviation")
    np.testing.assert_allclose(found, expected, atol=1e-9)
    np.testing.assert_allclose(group_advantages(rewards, "mean"), centered, atol=1e-9)
    assert not found[2].any()


def test_leaving_one_out_subtracts_the_mean_of_the_others():
    found = group_advantages(np.array([[1.0, 2.0, 6.0]]), "leave_one_out")
    np.testing.assert_allclose(found, [[1 - 4, 2 - 3.5, 6 - 1.5]])


def test_the_batch_has_the_mean_and_the_deviation_of_reinforce_plus_plus():
    rewards = np.array([[1.0, 1.0], [0.0, 4.0]])
    found = group_advantages(rewards, "batch")
    deviation = np.std(rewards, ddof=1) + 1e-4
    np.testing.assert_allclose(found, (rewards - 1.5) / deviation)
    assert not group_advantages(np.full((3, 2), 0.1), "batch").any()


def test_k1_is_the_mean_log_ratio_to_the_frozen_model():
    samples = draw_samples()
    settings = GRPO(beta=0.5, divergence="k1", average="sequence")
    random = np.random.default_rng(0)
    logprobs, reference = -random.random((2, ROWS, LENGTH)).astype(np.float32)
    # The advantage is 0, so only the pull towards the frozen model is left.
    zeros, mask = jnp.zeros((ROWS, LENGTH)), jnp.asarray(samples.mask)
    losses, measured = GroupPolicy(settings).policy_losses(
        jnp.asarray(logprobs), zeros, zeros, mask, jnp.asarray(reference)
    )
    expected = samples.mask * (logprobs - reference)
    np.testing.assert_allclose(measured["kl"] * mask, expected, atol=1e-6)
    np.testing.assert_allclose(losses * mask, 0.5 * expected, atol=1e-6)


def test_the_gradient_of_k1_is_that_of_the_divergence():
    logits, frozen = np.random.default_rng(0).normal(size=(2, 5)).astype(np.float32)
    policy = GroupPolicy(GRPO(beta=1.0, divergence="k1"))
    zeros, ones = jnp.zeros((5, 1)), jnp.ones((5, 1))
    reference = jax.nn.log_softmax(frozen)

    def mean_loss(logits):
        """The mean over all answers of one token, drawn at `logits` as they are."""
        logprobs = jax.nn.log_softmax(logits)
        losses, _ = policy.policy_losses(
            logprobs[:, None], zeros, zeros, ones, reference[:, None]
        )
        return jnp.sum(jax.lax.stop_gradient(jnp.exp(logprobs)) * losses[:, 0])

    def divergence(logits):
        logprobs = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(logprobs) * (logprobs - reference))

    for compute in (lambda f: f(logits), lambda f: jax.grad(f)(logits)):
        np.testing.assert_allclose(compute(mean_loss), compute(divergence), atol=1e-6)


def test_a_batch_of_masked_answers_has_a_loss_of_zero():
    samples = draw_samples(range(ROWS))
    objective = GroupPolicy(GRPO())
    batch = batch_of(samples, np.zeros_like(samples.mask))
    sums = objective.sums(
        jnp.asarray(samples.hidden), jnp.asarray(samples.kernel), batch
    )
    assert sums.loss / objective.divisor(batch) == 0
    assert sums.accuracy == 0


def test_rows_that_only_fill_a_batch_change_no_average():
    samples = draw_samples()
    batch = batch_of(samples, np.zeros_like(samples.mask))
    real = np.array([1, 1, 1, 1, 0, 0], np.int32)
    averages = ((GRPO(average="sequence"), 4), (GRPO(average="constant"), 4 * LONGEST))
    for settings, expected in averages:
        objective = GroupPolicy(settings).drawn(1.0, LONGEST)
        assert objective.divisor(dataclasses.replace(batch, real_rows=real)) == expected
