import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import logical_axes, merge, split
from prompt_tuning.prompts.initializers import Vocabulary, from_array
from prompt_tuning.prompts.reparameterized import MLPPrompt, ResidualPrompt
from prompt_tuning.prompts.soft import SoftPrompt
from tests.support.dummies import LetterTokenizer

P, D = 4, 6
KEY = jax.random.key(0)
TABLE = np.random.default_rng(0).standard_normal((9, D)).astype("f4")
VOCABULARY = Vocabulary(TABLE, LetterTokenizer())
SOFT = functools.partial(SoftPrompt, length=P, initializer=from_array(TABLE[:P]))
MLP = functools.partial(MLPPrompt, inner=SOFT, hidden_width=5)
RESIDUAL = functools.partial(ResidualPrompt, inner=SOFT, hidden_width=5)
networks = pytest.mark.parametrize("network", [MLP, RESIDUAL], ids=["mlp", "residual"])


def numbered(factory):
    """Fills a prompt with distinct numbers, and evaluates it under `jit`."""
    graph, parameters = split(factory(KEY, VOCABULARY))
    random = np.random.default_rng(1)
    numbers = {
        path: random.standard_normal(leaf.shape).astype("f4")
        for path, leaf in parameters.items()
    }
    vectors = jax.jit(lambda parameters: merge(graph, parameters)())(numbers)
    return numbers, np.asarray(vectors)


def linear(numbers, name, x):
    return x @ numbers[f"{name}/kernel"] + numbers[f"{name}/bias"]


def test_a_three_layer_network_computes_the_vectors():
    numbers, vectors = numbered(MLP)
    hidden = np.maximum(linear(numbers, "hidden", numbers["inner/prompt"]), 0)
    hidden = np.maximum(linear(numbers, "middle", hidden), 0)
    np.testing.assert_allclose(vectors, linear(numbers, "output", hidden), rtol=1e-4)


def test_a_residual_network_adds_normalized_vectors():
    numbers, vectors = numbered(RESIDUAL)
    inner = numbers["inner/prompt"]
    up = linear(numbers, "up", np.maximum(linear(numbers, "down", inner), 0))
    deviation = np.sqrt(up.var(1, keepdims=True) + 1e-5)
    normed = (up - up.mean(1, keepdims=True)) / deviation
    expected = inner + normed * numbers["scale"] + numbers["bias"]
    np.testing.assert_allclose(vectors, expected, rtol=1e-4, atol=1e-5)


def test_a_residual_prompt_may_start_at_the_inner_prompt():
    np.testing.assert_array_equal(
        RESIDUAL(KEY, VOCABULARY, norm_scale=0.0)(), TABLE[:P]
    )
    added = np.asarray(RESIDUAL(KEY, VOCABULARY)()) - TABLE[:P]
    np.testing.assert_allclose(added.mean(1), 0, atol=1e-5)
    np.testing.assert_allclose(added.std(1), 1, atol=1e-2)


@networks
def test_the_hidden_width_is_configured_or_the_models(network):
    shapes = {p: x.shape for p, x in split(network(KEY, VOCABULARY))[1].items()}
    assert {s[-1] for p, s in shapes.items() if "hidden/" in p or "down/" in p} == {5}
    wide = split(network(KEY, VOCABULARY, hidden_width=None))[1]
    first = "hidden/kernel" if network is MLP else "down/kernel"
    assert wide[first].shape == (D, D)


@networks
def test_a_network_folds_into_plain_vectors(network):
    prompt = network(KEY, VOCABULARY)
    folded = SOFT(KEY, VOCABULARY, initializer=from_array(prompt()))
    np.testing.assert_array_equal(folded(), prompt())
    assert prompt().shape == (P, D) and prompt.length == P
    assert set(logical_axes(prompt)) == set(split(prompt)[1])


@networks
def test_every_parameter_of_a_network_has_a_gradient(network):
    graph, parameters = split(network(KEY, VOCABULARY, hidden_width=32))
    target = jnp.asarray(TABLE[P : 2 * P])

    def loss(parameters):
        return jnp.square(merge(graph, parameters)() - target).sum()

    gradient = jax.grad(loss)(parameters)
    assert all(np.abs(leaf).max() > 0 for leaf in gradient.values())


@networks
def test_a_network_needs_a_width_and_a_prompt(network):
    with pytest.raises(InputError, match="hidden_width is 0, expected at least 1"):
        network(KEY, VOCABULARY, hidden_width=0)
    with pytest.raises(InputError, match=r"inner makes an? .*Array.*such as Soft"):
        network(KEY, VOCABULARY, inner=lambda key, vocabulary: jnp.zeros((P, D)))
