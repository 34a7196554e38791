import functools

import jax
import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import merge, split
from prompt_tuning.models.scoring import loss_sums
from prompt_tuning.prompts.initializers import Vocabulary, from_array
from prompt_tuning.prompts.reparameterized import MLPPrompt
from prompt_tuning.prompts.soft import SoftPrompt
from prompt_tuning.prompts.wrapped import DroppedPrompt
from tests.support.dummies import LLAMA, make_batch, random_rows, with_prompt

P, D = 4, 6
KEY = jax.random.key(0)
TABLE = np.random.default_rng(0).standard_normal((9, D)).astype("f4")
VOCABULARY = Vocabulary(TABLE)
SOFT = functools.partial(SoftPrompt, length=P, initializer=from_array(TABLE[:P]))


def dropped(rate, inner=SOFT):
    return DroppedPrompt(KEY, VOCABULARY, inner=inner, rate=rate)


def test_dropout_needs_a_key():
    np.testing.assert_array_equal(dropped(0.5)(), TABLE[:P])
    assert dropped(0.5).drops and not dropped(0.0).drops
    assert not np.array_equal(dropped(0.5)(KEY), TABLE[:P])


def test_dropout_zeroes_its_share_and_scales_the_rest():
    ones = functools.partial(
        SoftPrompt, length=2000, initializer=from_array(np.ones((2000, D), "f4"))
    )
    graph, parameters = split(dropped(0.25, ones))
    result = jax.jit(lambda p, key: merge(graph, p)(key))(parameters, KEY)
    assert set(np.unique(result)) == {np.float32(0), np.float32(1 / 0.75)}
    assert np.mean(result == 0) == pytest.approx(0.25, abs=0.02)
    again = np.asarray(result)
    assert np.array_equal(again, dropped(0.25, ones)(KEY))
    assert not np.array_equal(again, dropped(0.25, ones)(jax.random.key(1)))


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_a_dropout_rate_of_1_is_refused(rate):
    with pytest.raises(InputError, match=f"dropout rate is {rate}"):
        dropped(rate)


def test_the_dropout_key_reaches_the_innermost_prompt():
    nested = MLPPrompt(KEY, VOCABULARY, inner=lambda *_: dropped(0.5))
    assert not np.array_equal(nested(KEY), nested())


@pytest.mark.parametrize("kind", ["dropped", "soft"])
def test_a_prompt_has_its_dropout_key_in_a_model_without_dropout(kind):
    vocabulary = Vocabulary(np.ones((LLAMA.vocabulary_size, LLAMA.width), "f4"))
    prompt = SoftPrompt(KEY, vocabulary, length=3)
    if kind == "dropped":
        prompt = DroppedPrompt(KEY, vocabulary, inner=lambda *_: prompt, rate=0.5)
    graph, parameters = with_prompt(LLAMA, prompt)
    batch = make_batch(LLAMA, random_rows([(3, 2), (4, 2)]))
    measure = jax.jit(loss_sums, static_argnums=0)
    losses = [measure(graph, parameters, batch, key).loss for key in (None, KEY)]
    assert (losses[0] != losses[1]) == (kind == "dropped")
