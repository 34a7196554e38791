"""Prefixes that start from a text."""

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import prompt_tuning as pt
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import merge
from prompt_tuning.models.build import build_model
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.pretrained.text_prefixes import start_from_text
from prompt_tuning.prompts.initializers import StackShape, Vocabulary
from prompt_tuning.prompts.prefix import KeyValuePrefix
from prompt_tuning.sharding.mesh import MeshShape
from tests.support.dummies import GPT2, LLAMA, with_numbers
from tests.support.meshes import layout_of, placed

PREFIX = "decoder/prompt/prompt"
TEXT, REST = (3, 14, 1, 5, 9), (2, 6, 5, 3)
CONFIGS = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "alibi": dataclasses.replace(GPT2, positions="alibi", maximum_positions=None),
    "qk_norm": dataclasses.replace(LLAMA, query_key_norm="head"),
}


def with_prefix(config):
    """Returns a model with a prefix of as many slots as the text has tokens."""
    shape = StackShape(config.layers, config.key_value_heads, config.head_width)
    table = np.zeros((config.vocabulary_size, config.width), np.float32)

    def build(key):
        vocabulary = Vocabulary(table, stack=shape)
        prefix = KeyValuePrefix(key, vocabulary, length=len(TEXT))
        return build_model(key, config, prefix)

    return with_numbers(build)


def next_state(graph, parameters, tokens):
    model = cast(LanguageModel, merge(graph, parameters))
    state, _ = model.prefill(jnp.array([tokens]), jnp.array([len(tokens)]), 1)
    return state


@pytest.mark.parametrize("name", CONFIGS)
def test_a_prefix_acts_as_the_text_that_it_starts_from(name):
    config = CONFIGS[name]
    frozen = with_numbers(lambda key: build_model(key, config))
    expected = next_state(*frozen, TEXT + REST)
    graph, parameters = with_prefix(config)
    started = start_from_text(parameters, TEXT, config, None)
    np.testing.assert_allclose(next_state(graph, started, REST), expected, atol=1e-5)
    assert np.abs(next_state(graph, parameters, REST) - expected).max() > 0.01


def test_a_mesh_starts_a_prefix_from_the_same_numbers():
    graph, parameters = with_prefix(LLAMA)
    placement = placed(layout_of(MeshShape(data=2, tensor=2), LLAMA), graph, parameters)
    on_mesh = {path: placement.put(path, x) for path, x in parameters.items()}
    actual = start_from_text(on_mesh, TEXT, LLAMA, placement)[PREFIX]
    assert actual.sharding == placement.shardings[PREFIX]
    expected = start_from_text(parameters, TEXT, LLAMA, None)[PREFIX]
    np.testing.assert_allclose(jax.device_get(actual), expected, atol=1e-6)


def test_the_tokens_that_begin_a_text_are_the_first_slots():
    model = pt.load("bundled:skills-decoder")
    first, other = (
        model.attach(pt.KeyValuePrefix(length=3, initializer=pt.from_text(text)))
        for text in ("upper: a=", "reverse: a=")
    )
    arrays = [each.partition()[0][PREFIX] for each in (first, other)]
    np.testing.assert_array_equal(arrays[0][:, :, 0], arrays[1][:, :, 0])
    assert np.abs(arrays[0][:, :, 1] - arrays[1][:, :, 1]).max() > 0.01


@pytest.mark.parametrize(
    ("model", "length", "message"),
    [
        ("bundled:skills-decoder", 9, "a prefix of 9 slots starts from a text of"),
        ("bundled:skills-t5", 2, "this is an encoder-decoder"),
    ],
)
def test_a_start_that_is_not_possible_is_refused(model, length, message):
    prefix = pt.KeyValuePrefix(length=length, initializer=pt.from_text("abc"))
    with pytest.raises(InputError, match=message):
        pt.load(model).attach(prefix)
