import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import logical_axes, split
from prompt_tuning.prompts.initializers import Vocabulary, from_array
from prompt_tuning.prompts.soft import (
    InferenceOnlyPrompt,
    PaddedPrompt,
    SoftPrompt,
    StackedPrompts,
)

KEY = jax.random.key(0)
VOCABULARY = Vocabulary(np.ones((7, 4), np.float32))
VECTORS = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize("kind", [SoftPrompt, InferenceOnlyPrompt])
def test_a_prompt_returns_its_vectors_unbatched(kind):
    prompt = kind(KEY, VOCABULARY, length=3, initializer=from_array(VECTORS))
    graph, state = nnx.split(prompt)
    vectors = jax.jit(lambda state: nnx.merge(graph, state)())(state)
    np.testing.assert_array_equal(vectors, VECTORS)
    assert prompt.length == 3


@pytest.mark.parametrize("kind", [SoftPrompt, InferenceOnlyPrompt])
def test_a_prompt_is_uniform_below_a_half_by_default(kind):
    vectors = kind(KEY, VOCABULARY, length=50)()
    assert vectors.shape == (50, 4)
    assert 0 <= vectors.min() < 0.05 and 0.45 < vectors.max() < 0.5


def test_a_soft_prompt_is_one_float32_parameter_with_named_axes():
    half = from_array(VECTORS.astype(np.float16))
    prompt = SoftPrompt(KEY, VOCABULARY, length=3, initializer=half)
    _, parameters = split(prompt)
    assert list(parameters) == ["prompt"]
    assert parameters["prompt"].dtype == jnp.float32
    assert logical_axes(prompt)["prompt"].names == ("prompt", "prompt_embed")


def test_an_inference_only_prompt_has_no_parameters():
    _, state = nnx.split(InferenceOnlyPrompt(KEY, VOCABULARY, length=3))
    assert not jax.tree.leaves(state)


@pytest.mark.parametrize("kind", [SoftPrompt, InferenceOnlyPrompt])
def test_a_prompt_needs_at_least_one_vector(kind):
    with pytest.raises(InputError, match="length is 0, expected at least 1"):
        kind(KEY, VOCABULARY, length=0)


def test_an_initializers_output_is_checked():
    def transposed(key, shape, vocabulary):
        return jnp.zeros(shape[::-1])

    with pytest.raises(InputError, match=r"returned \(4, 3\), expected \(3, 4\)"):
        SoftPrompt(KEY, VOCABULARY, length=3, initializer=transposed)


def test_constants_are_equal_if_their_numbers_are():
    graphs = [
        nnx.split(InferenceOnlyPrompt(KEY, VOCABULARY, length=3, initializer=start))[0]
        for start in map(from_array, (VECTORS, VECTORS.copy(), VECTORS + 1))
    ]
    assert graphs[0] == graphs[1] and hash(graphs[0]) == hash(graphs[1])
    assert graphs[0] != graphs[2]


def test_stacked_prompts_are_one_module_of_several():
    stacked = StackedPrompts(jnp.stack([VECTORS, 2 * VECTORS]))
    np.testing.assert_array_equal(stacked()[1], 2 * VECTORS)
    assert (stacked.count, stacked.length, stacked.real_length) == (2, 3, 3)
    names = logical_axes(stacked)["prompt"].names
    assert names == ("tasks", "prompt", "prompt_embed")


def test_padding_is_not_part_of_a_prompt():
    padded = PaddedPrompt(jnp.asarray(VECTORS), 2)
    assert (padded.length, int(padded.real_length), padded.count) == (3, 2, 1)


def test_a_plain_prompt_drops_nothing_and_costs_nothing():
    prompt = SoftPrompt(KEY, VOCABULARY, length=3)
    np.testing.assert_array_equal(prompt(KEY), prompt())
    assert prompt.count == 1 and prompt.penalty() == 0
    assert not prompt.has_penalty and not prompt.drops
