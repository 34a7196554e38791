"""Prompts that depend on the text: their vectors, and what they read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.prompts.initializers import Vocabulary, from_array
from prompt_tuning.prompts.input_dependent import InstancePrompt, PromptPool
from prompt_tuning.prompts.soft import SoftPrompt
from prompt_tuning.prompts.wrapped import DroppedPrompt
from prompt_tuning.settings.prompting import Prompting
from tests.support import dummies

P, W, K = dummies.P, 5, 3
KEY = jax.random.key(0)
MAKE = {
    "instance": functools.partial(InstancePrompt, length=P, hidden_width=W),
    "pool": functools.partial(PromptPool, length=P, size=K),
}
RANDOM = np.random.default_rng(0)


def vocabulary(width):
    return Vocabulary(np.zeros((dummies.V, width), "f4"))


def prompt_of(name, width):
    """Returns a prompt whose parameters are all random."""
    prompt = MAKE[name](KEY, vocabulary(width))
    random = np.random.default_rng(1)
    for leaf in prompt.form.axes:
        parameter = getattr(prompt, leaf)
        parameter.set_value(jnp.asarray(random.standard_normal(parameter.shape), "f4"))
    return prompt


def by_hand(prompt, embedded):
    """Computes the vectors of one text `[T, D]` with NumPy, from the formulas."""
    mean = np.asarray(embedded, np.float64).mean(0) if len(embedded) else np.zeros(1)
    query = mean / max(np.linalg.norm(mean), 1e-12)
    if isinstance(prompt, InstancePrompt):
        query = np.broadcast_to(query, prompt.down.shape[:1])
        hidden = np.maximum(query @ prompt.down[...] + prompt.down_bias[...], 0)
        return prompt.prompt[...] + np.tensordot(hidden, prompt.up[...], 1)
    scores = np.broadcast_to(query, prompt.keys.shape[1:]) @ prompt.keys[...].T
    weights = np.exp(scores) / np.exp(scores).sum()
    return np.tensordot(weights, prompt.prompts[...], 1)


@pytest.mark.parametrize("name", MAKE)
def test_the_vectors_follow_the_formulas_and_read_given_tokens_only(name):
    prompt = prompt_of(name, width=6)
    embedded = RANDOM.standard_normal((3, 7, 6)).astype("f4")
    given = np.zeros((3, 7), bool)
    given[0, :4] = given[1, [2, 5]] = True  # the third text has no given tokens
    vectors = prompt.for_text(
        jnp.zeros((3, 7), int), jnp.asarray(embedded), jnp.asarray(given)
    )
    for row in range(3):
        expected = by_hand(prompt, embedded[row][given[row]])
        np.testing.assert_allclose(vectors[row], expected, atol=1e-5)


@pytest.mark.parametrize("name", MAKE)
def test_gradients_are_finite_without_given_tokens(name):
    prompt = prompt_of(name, width=6)
    tokens, none = jnp.zeros((1, 2), int), jnp.zeros((1, 2), bool)
    gradient = jax.grad(lambda x: prompt.for_text(tokens, x, none).sum())
    assert np.isfinite(gradient(jnp.ones((1, 2, 6)))).all()


ROWS = dummies.random_rows([(4, 3), (2, 5), (6, 1)])
MODELS = {"llama": dummies.LLAMA, "t5": dummies.T5_GATED}


def table_of(parameters, config):
    """Returns the embedding table as the model uses it."""
    return np.asarray(parameters["token_embedder/embedding"], "f4")


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", MAKE)
def test_a_row_equals_a_model_with_the_soft_prompt_of_its_text(name, model):
    config = MODELS[model]
    prompt = prompt_of(name, config.width)
    graph, parameters = dummies.with_prompt(config, prompt)
    table = table_of(parameters, config)
    actual = dummies.logits(parameters, dummies.make_batch(config, ROWS), graph=graph)
    for row, (given, completion) in enumerate(ROWS):
        vectors = np.asarray(by_hand(prompt, table[given]), "f4")
        soft = SoftPrompt(
            KEY, vocabulary(config.width), length=P, initializer=from_array(vectors)
        )
        own_graph, own = dummies.with_prompt(config, soft)
        batch = dummies.make_batch(config, [(given, completion)])
        expected = dummies.logits(own, batch, graph=own_graph)
        count = len(completion)
        np.testing.assert_allclose(actual[row, :count], expected[0], atol=1e-4)


@pytest.mark.parametrize("name", MAKE)
def test_generation_reads_what_training_reads(name):
    config = dummies.LLAMA
    graph, parameters = dummies.with_prompt(config, prompt_of(name, config.width))
    rows = dummies.random_rows([(4, 3), (2, 3)])
    batch = dummies.make_batch(config, rows)
    given = dummies.make_batch(config, [(row[0], []) for row in rows])
    by_step = dummies.logits_by_step(
        parameters,
        given.tokens,
        given.lengths,
        np.array([row[1] for row in rows]),
        graph=graph,
    )
    whole = dummies.logits(parameters, batch, graph=graph)
    np.testing.assert_allclose(by_step, whole, atol=1e-4)


def test_shared_execution_is_refused():
    config = dummies.LLAMA
    prompt = prompt_of("pool", config.width)
    with pytest.raises(InputError, match="depends on each row's text"):
        dummies.with_prompt(config, prompt, Prompting(execution="shared"))


def test_wrapping_is_refused():
    with pytest.raises(InputError, match="does not depend on the text"):
        DroppedPrompt(KEY, vocabulary(6), inner=MAKE["pool"], rate=0.1)


@pytest.mark.parametrize(
    "make, message",
    (
        (functools.partial(InstancePrompt, length=0), "length is 0"),
        (functools.partial(InstancePrompt, length=2, hidden_width=0), "width is 0"),
        (functools.partial(PromptPool, length=2, size=1), "size of the .* is 1"),
    ),
)
def test_sizes_are_checked(make, message):
    with pytest.raises(InputError, match=message):
        make(KEY, vocabulary(6))
