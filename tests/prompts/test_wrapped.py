"""Prompts that are computed from another prompt keep its properties."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.prompts.initializers import Vocabulary, from_array
from prompt_tuning.prompts.multitask import AddMultiTaskPrompt
from prompt_tuning.prompts.reparameterized import MLPPrompt, ResidualPrompt
from prompt_tuning.prompts.soft import PaddedPrompt, SoftPrompt
from prompt_tuning.prompts.wayward import WaywardPrompt
from prompt_tuning.prompts.wrapped import DroppedPrompt
from tests.support.dummies import LetterTokenizer

P, D = 4, 6
KEY = jax.random.key(0)
TABLE = np.random.default_rng(0).standard_normal((9, D)).astype("f4")
VOCABULARY = Vocabulary(TABLE, LetterTokenizer())
SOFT = functools.partial(SoftPrompt, length=P, initializer=from_array(TABLE[:P]))


def padded(key, vocabulary):
    return PaddedPrompt(jnp.asarray(TABLE[:P]), 3)


def wayward(key, vocabulary):
    prompt = WaywardPrompt(key, vocabulary, text="abcd", gamma=0.5)
    prompt.prompt.set_value(prompt.prompt[...] + 1.0)
    return prompt


def tasks(key, vocabulary):
    return AddMultiTaskPrompt(key, vocabulary, length=P, tasks=3)


def dropped(key, vocabulary):
    return DroppedPrompt(key, vocabulary, inner=SOFT, rate=0.5)


@pytest.mark.parametrize(
    "wrapper", [MLPPrompt, ResidualPrompt, functools.partial(DroppedPrompt, rate=0.5)]
)
def test_a_wrapped_prompt_keeps_padding_tasks_and_penalty(wrapper):
    assert wrapper(KEY, VOCABULARY, inner=padded).real_length == 3
    assert wrapper(KEY, VOCABULARY, inner=padded).length == P
    assert wrapper(KEY, VOCABULARY, inner=dropped).drops
    for_tasks = wrapper(KEY, VOCABULARY, inner=tasks)
    assert for_tasks.count == 3 and for_tasks().shape == (3, P, D)
    plain, paying = (wrapper(KEY, VOCABULARY, inner=i) for i in (SOFT, wayward))
    assert not plain.has_penalty and plain.penalty() == 0
    assert paying.has_penalty
    assert paying.penalty() == pytest.approx(0.5 * D, rel=1e-5)
