from typing import cast

import jax
import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import merge, split
from prompt_tuning.prompts.initializers import Vocabulary, from_array
from prompt_tuning.prompts.prompt_module import InputPrompt
from prompt_tuning.prompts.wayward import WaywardPrompt
from tests.support.dummies import LetterTokenizer

D = 6
KEY = jax.random.key(0)
TABLE = np.random.default_rng(0).standard_normal((9, D)).astype("f4")
VOCABULARY = Vocabulary(TABLE, LetterTokenizer())


def test_a_wayward_prompt_starts_at_its_text_without_penalty():
    prompt = WaywardPrompt(KEY, VOCABULARY, text="bad")
    np.testing.assert_array_equal(prompt(), TABLE[[1, 0, 3]])
    assert prompt.gamma == 0.01
    assert prompt.penalty() == 0
    # The discrete prompt is not a parameter, so nothing trains or restores it.
    assert list(split(prompt)[1]) == ["prompt"]


def test_the_penalty_is_gamma_times_the_mean_squared_distance():
    prompt = WaywardPrompt(KEY, VOCABULARY, text="bad", gamma=0.5)
    graph, parameters = split(prompt)
    moved = {"prompt": parameters["prompt"].at[0, 0].add(3.0).at[2, 1].add(-4.0)}

    def penalty(parameters):
        return cast(InputPrompt, merge(graph, parameters)).penalty()

    assert jax.jit(penalty)(moved) == pytest.approx(0.5 * (9 + 16) / 3, rel=1e-5)
    gradient = jax.grad(penalty)(moved)["prompt"]
    expected = np.zeros((3, D))
    expected[0, 0], expected[2, 1] = 0.5 * 2 * 3 / 3, 0.5 * 2 * -4 / 3
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)


def test_a_wayward_prompt_can_have_another_start():
    start = from_array(TABLE[4:7])
    prompt = WaywardPrompt(KEY, VOCABULARY, text="bad", initializer=start)
    np.testing.assert_array_equal(prompt(), TABLE[4:7])
    away = np.square(TABLE[4:7] - TABLE[[1, 0, 3]]).sum() / 3
    assert prompt.penalty() == pytest.approx(0.01 * away, rel=1e-5)


def test_a_wayward_prompt_needs_a_text_and_a_weight():
    with pytest.raises(InputError, match="has no tokens"):
        WaywardPrompt(KEY, VOCABULARY, text=" ")
    with pytest.raises(InputError, match="no tokenizer"):
        WaywardPrompt(KEY, Vocabulary(TABLE), text="bad")
    with pytest.raises(InputError, match=r"gamma is -1\.0, expected 0 or more"):
        WaywardPrompt(KEY, VOCABULARY, text="bad", gamma=-1.0)
