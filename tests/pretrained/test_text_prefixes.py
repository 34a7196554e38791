"""Prefixes that start from a text."""

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prompt_tuning as pt
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameter_groups import ParameterGroup, group_optimizer
from prompt_tuning.core.parameters import merge
from prompt_tuning.models.build import build_model
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.pretrained.attention_matching import text_parts
from prompt_tuning.pretrained.text_prefixes import check_start, start_prefix
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.prompts.prefix import KeyValuePrefix
from prompt_tuning.prompts.stack_shape import PrefixStart, StackShape
from prompt_tuning.prompts.text_starts import spread_windows
from prompt_tuning.settings.mesh_shape import MeshShape
from tests.support.dummies import DEEPSEEK, GPT2, LLAMA, with_numbers
from tests.support.meshes import layout_of, placed

PREFIX = "decoder/prompt/prompt"
TEXT, REST = (3, 14, 1, 5, 9), (2, 6, 5, 3)
CONFIGS = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "alibi": dataclasses.replace(GPT2, positions="alibi", maximum_positions=None),
    "deepseek": DEEPSEEK,
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


@functools.partial(jax.jit, static_argnums=0)
def read_tokens(graph, parameters, tokens):
    model = cast(LanguageModel, merge(graph, parameters))
    state, _ = model.prefill(tokens, jnp.array(tokens.shape[1:]), 1)
    return state


def next_state(graph, parameters, tokens):
    return read_tokens(graph, parameters, np.array([tokens]))


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_prefix_acts_as_the_text_that_it_starts_from(name):
    config = CONFIGS[name]
    frozen = with_numbers(lambda key: build_model(key, config))
    expected = next_state(*frozen, TEXT + REST)
    graph, parameters = with_prefix(config)
    started = start_prefix(parameters, PrefixStart(TEXT), config, None)
    np.testing.assert_allclose(next_state(graph, started, REST), expected, atol=1e-5)
    assert np.abs(next_state(graph, parameters, REST) - expected).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "qk_norm", "deepseek"])
def test_matched_attention_to_all_tokens_acts_as_the_text(name):
    config = CONFIGS[name]
    frozen = with_numbers(lambda key: build_model(key, config))
    expected = next_state(*frozen, TEXT + REST)
    graph, parameters = with_prefix(config)
    start = PrefixStart(TEXT, windows=3)
    started = start_prefix(parameters, start, config, None)
    np.testing.assert_allclose(next_state(graph, started, REST), expected, atol=0.01)


def test_matched_attention_is_closer_to_the_text_than_windows_of_it():
    # Far more tokens than slots, and other tokens behind them than are read again.
    text = tuple(int(x) for x in np.random.default_rng(0).integers(1, 30, 24))
    frozen = with_numbers(lambda key: build_model(key, LLAMA))
    expected = next_state(*frozen, text + REST)
    graph, parameters = with_prefix(LLAMA)
    matched, chunks = (
        start_prefix(parameters, start, LLAMA, None)
        for start in (
            PrefixStart(text, windows=6),
            PrefixStart(spread_windows(text, len(TEXT), 2, 1)),
        )
    )
    errors = [
        float(np.linalg.norm(next_state(graph, x, REST) - expected))
        for x in (matched, chunks)
    ]
    assert errors[0] < 0.5 * errors[1]


def test_a_long_text_is_matched_in_parts_that_cover_it():
    config = dataclasses.replace(LLAMA, maximum_positions=16)
    text = (0, *range(1, 30))
    parts = text_parts(PrefixStart(text, 2, begin=1), config)
    assert [part.tokens for part in parts] == [
        (0, *range(first, first + 7)) for first in (1, 6, 12, 17, 23)
    ]
    assert text_parts(PrefixStart(text[:8], 2, begin=1), config)[0].tokens == text[:8]
    graph, parameters = with_prefix(config)
    started = start_prefix(parameters, PrefixStart(text, 2, begin=1), config, None)
    assert started[PREFIX].shape == parameters[PREFIX].shape
    assert np.isfinite(next_state(graph, started, REST)).all()


def test_windows_are_spread_from_the_first_to_the_last_token():
    assert spread_windows(tuple(range(20)), 7, 3, 1) == (0, 1, 2, 9, 10, 18, 19)
    assert spread_windows(tuple(range(5)), 5, 3, 1) == (0, 1, 2, 3, 4)
    assert spread_windows(tuple(range(9)), 2, 8, 1) == (0, 1)


def test_frozen_slots_keep_their_bits_and_have_no_optimizer_state():
    start = np.random.default_rng(0).normal(size=(2, 2, 5, 1, 3)).astype("f4")
    start[:, :, 0, :, :2] = [0.0, -0.0]
    trained = {PREFIX: jnp.array(start), "scale": jnp.ones(2)}
    group = ParameterGroup([".*"], optax.adamw(0.1, weight_decay=0.1))
    optimizer = group_optimizer([group], dict.fromkeys(trained, 0), {PREFIX: 2})
    state = optimizer.init(trained)
    assert sorted(x.shape for x in jax.tree.leaves(state) if x.ndim) == [
        *[(2,)] * 2,
        *[(2, 2, 3, 1, 3)] * 2,
    ]
    changes, _ = optimizer.update(jax.tree.map(jnp.ones_like, trained), state, trained)
    changed: Any = optax.apply_updates(trained, changes)
    end = np.asarray(changed[PREFIX])
    np.testing.assert_array_equal(end[:, :, :2].view("i4"), start[:, :, :2].view("i4"))
    assert np.abs(end[:, :, 2:] - start[:, :, 2:]).min() > 0.05


def test_a_mesh_starts_a_prefix_from_the_same_numbers():
    graph, parameters = with_prefix(LLAMA)
    placement = placed(layout_of(MeshShape(data=2, tensor=2), LLAMA), graph, parameters)
    on_mesh = {path: placement.put(path, x) for path, x in parameters.items()}
    actual = start_prefix(on_mesh, PrefixStart(TEXT), LLAMA, placement)[PREFIX]
    assert actual.sharding == placement.shardings[PREFIX]
    expected = start_prefix(parameters, PrefixStart(TEXT), LLAMA, None)[PREFIX]
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


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CONFIGS["alibi"], "positions of the kind 'alibi'"),
        (dataclasses.replace(LLAMA, attention_soft_cap=5.0), "attention_soft_cap"),
    ],
)
def test_attention_that_the_closed_form_does_not_know_is_refused(config, message):
    with pytest.raises(InputError, match=message):
        check_start(PrefixStart(TEXT, 2), config, "device", None)


def test_a_prefix_without_moving_slots_is_refused():
    prefix = pt.KeyValuePrefix(length=3, frozen_slots=3)
    with pytest.raises(InputError, match="so nothing would be trained"):
        pt.load("bundled:skills-decoder").attach(prefix)
