"""Prompts of several lengths, several prompts, packed rows: each as if alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.rematerialization import Rematerialization
from prompt_tuning.prompts.prompt_module import InputPrompt
from prompt_tuning.prompts.soft import PaddedPrompt
from prompt_tuning.settings.prompting import Prompting
from prompt_tuning.training.gradients import gradients
from tests.support import dummies
from tests.support.exhaustive import sample

N, P, D = 2, dummies.P, dummies.LLAMA.width
VECTORS = np.random.default_rng(0).standard_normal((N, P, D)).astype(np.float32)
JOINED = Prompting(execution="joined")
ISOLATED = Prompting(visibility=("prompt->prompt",))
JOINED_ISOLATED = Prompting(visibility=("prompt->prompt",), execution="joined")
WAYS = {
    "llama shared": (dummies.LLAMA, None),
    "llama joined": (dummies.LLAMA, JOINED),
    "llama suffix": (dummies.LLAMA, Prompting(placement="suffix")),
    "llama prefix attention": (dummies.LLAMA, Prompting(prefix_attention=True)),
    "gpt2 shared": (dummies.GPT2, None),
    "t5 joined": (dummies.T5_GATED, None),
    "t5 suffix": (dummies.T5_GATED, Prompting(placement="suffix")),
    "t5 isolated": (dummies.T5_GATED, ISOLATED),
    "t5 isolated, joined": (dummies.T5_GATED, JOINED_ISOLATED),
}
MAIN_WAYS = ["llama shared", "llama prefix attention", "t5 joined", "t5 isolated"]

compute = jax.jit(gradients, static_argnums=0)


class Prompts(InputPrompt):
    """Vectors `[P, D]`, or `[N, P, D]` of several prompts."""

    def __init__(self, vectors):
        self.prompt = nnx.Param(jnp.asarray(vectors), axes=("prompts",) * vectors.ndim)

    @property
    def length(self):
        return self.prompt.shape[-2]

    def __call__(self, key=None):
        return self.prompt[...]


def outcome(config, prompting, prompt, batch):
    """Sums of a batch, and the gradient of the loss sum with respect to the prompt."""
    graph, parameters = dummies.with_prompt(config, prompt, prompting)
    path = f"{dummies.PROMPT_PATHS[config.architecture]}/prompt"
    trained = {path: parameters.pop(path)}
    gradient, sums = compute(graph, trained, parameters, batch, None)
    return sums, gradient[path] * sums.weight


def rows_alone(batch: Batch, rows: list[int]) -> Batch:
    return jax.tree.map(lambda x: x[np.array(rows)], batch)


def assert_equal_sums(actual, expected):
    assert float(expected.loss) > 1
    np.testing.assert_allclose(actual.loss, expected.loss, rtol=1e-5)
    assert actual.weight == expected.weight


@pytest.mark.parametrize("grouped", sample(1, [True, False]))
@pytest.mark.parametrize("way", sample(1, MAIN_WAYS))
def test_each_of_several_prompts_is_computed_as_if_alone(way, grouped):
    config, prompting = WAYS[way]
    ids = [0, 0, 1, 1] if grouped else [1, 0, 0, 1]
    batch = dummies.make_batch(
        config, dummies.random_rows([(4, 3), (2, 5), (3, 1), (1, 2)])
    )
    together = batch
    if not grouped:
        together = dataclasses.replace(batch, prompt_ids=np.array(ids, np.int32))
    sums, gradient = outcome(config, prompting, Prompts(VECTORS), together)
    alone = [
        outcome(
            config,
            prompting,
            Prompts(VECTORS[n]),
            rows_alone(batch, [row for row, id in enumerate(ids) if id == n]),
        )
        for n in range(N)
    ]
    assert_equal_sums(sums, jax.tree.map(jnp.add, *(a[0] for a in alone)))
    for n in range(N):
        assert np.abs(alone[n][1]).max() > 1e-3
        np.testing.assert_allclose(gradient[n], alone[n][1], atol=2e-5)


def test_indivisible_rows_need_prompt_ids():
    batch = dummies.make_batch(dummies.LLAMA, dummies.random_rows([(4, 3)] * 3))
    with pytest.raises(ValueError, match="3 rows cannot be grouped evenly by 2"):
        outcome(dummies.LLAMA, JOINED, Prompts(VECTORS), batch)
    with pytest.raises(ValueError, match="3 rows cannot be grouped evenly by 2"):
        outcome(dummies.LLAMA, None, Prompts(VECTORS), batch)


@pytest.mark.parametrize("way", sample(2, WAYS))
def test_padding_of_a_prompt_changes_nothing(way):
    config, prompting = WAYS[way]
    batch = dummies.make_batch(config, dummies.random_rows([(4, 3), (2, 5)]))
    noise = np.full((2, D), 7, np.float32)
    padded = PaddedPrompt(jnp.asarray(np.concatenate([VECTORS[0], noise])), P)
    sums, gradient = outcome(config, prompting, padded, batch)
    expected_sums, expected = outcome(config, prompting, Prompts(VECTORS[0]), batch)
    assert_equal_sums(sums, expected_sums)
    np.testing.assert_allclose(gradient[:P], expected, atol=2e-5)
    np.testing.assert_array_equal(gradient[P:], 0)


@pytest.mark.exhaustive
def test_an_isolated_prompt_has_the_same_result_shared_and_joined():
    batch = dummies.make_batch(
        dummies.T5_GATED, dummies.random_rows([(4, 3), (2, 5), (6, 1)])
    )
    prompt = Prompts(VECTORS[0])
    shared, joined, seeing = (
        outcome(dummies.T5_GATED, prompting, prompt, batch)
        for prompting in (ISOLATED, JOINED_ISOLATED, None)
    )
    assert_equal_sums(shared[0], joined[0])
    np.testing.assert_allclose(shared[1], joined[1], atol=2e-5)
    assert abs(seeing[0].loss - shared[0].loss) > 1e-3


@pytest.mark.parametrize("way", sample(1, ["llama shared", "t5 joined", "t5 isolated"]))
def test_rematerialization_does_not_change_results(way):
    config, prompting = WAYS[way]
    batch = dummies.make_batch(config, dummies.random_rows([(4, 3), (2, 5)]))
    again = dataclasses.replace(
        config, rematerialization=Rematerialization(policy="nothing")
    )
    prompt = Prompts(VECTORS[0])
    sums, gradient = outcome(again, prompting, prompt, batch)
    expected_sums, expected = outcome(config, prompting, prompt, batch)
    assert_equal_sums(sums, expected_sums)
    np.testing.assert_allclose(gradient, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("way", sample(1, MAIN_WAYS))
def test_micro_batches_add_up_to_the_batch(way):
    config, prompting = WAYS[way]
    sizes = [(4, 3), (2, 5), (3, 1), (1, 2)]
    batch = dummies.make_batch(config, dummies.random_rows(sizes))
    halves = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), batch)
    prompt = Prompts(VECTORS[0])
    sums, gradient = outcome(config, prompting, prompt, halves)
    expected_sums, expected = outcome(config, prompting, prompt, batch)
    assert_equal_sums(sums, expected_sums)
    np.testing.assert_allclose(gradient, expected, atol=2e-5)
