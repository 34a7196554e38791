"""Layers whose mixer is recurrent: rows, prompts and packed examples, and refusals."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import prompt_tuning as pt
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.rematerialization import Rematerialization
from prompt_tuning.models.build import build_model
from prompt_tuning.models.recurrent_state import StateView
from prompt_tuning.models.short_convolution import convolve
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.prompts.prefix import KeyValuePrefix
from prompt_tuning.prompts.stack_shape import StackShape
from prompt_tuning.training.gradients import gradients
from tests.support import dummies


def test_each_output_is_a_sum_of_the_last_inputs_of_its_example():
    random = np.random.default_rng(0)
    x, taps = random.normal(size=(1, 5, 2)), random.normal(size=(3, 2))
    window = random.normal(size=(1, 2, 2))
    segments = jnp.array([[1, 1, 2, 2, 2]])
    view = StateView.create(None, 5, segments, None)
    arrays = (jnp.asarray(each, jnp.float32) for each in (x, taps, window))
    values, weights, before = arrays
    output, _ = convolve(values, weights, view, before)
    for start, stop in ((0, 2), (2, 5)):
        inputs = np.concatenate([window[0], x[0, start:stop]])
        for i in range(stop - start):
            expected = (inputs[i : i + 3] * taps).sum(0)
            np.testing.assert_allclose(output[0, start + i], expected, rtol=1e-5)


def test_a_state_ignores_padding():
    x = jnp.arange(12.0).reshape(2, 3, 2)
    view = StateView.create(None, 3, None, jnp.array([2, 0]))
    _, window = convolve(x, jnp.ones((3, 2)), view, jnp.full((1, 2, 2), 7.0))
    np.testing.assert_array_equal(window, [x[0, :2], np.full((2, 2), 7)])


@functools.partial(jax.jit, static_argnums=0)
def loss_gradient(graph, trained, frozen, batch):
    return gradients(graph, trained, frozen, batch, None)[0]


def test_recomputed_layers_have_the_same_gradients():
    batch = dummies.make_batch(dummies.LFM2, dummies.random_rows([(4, 3), (2, 2)]))
    found = []
    for policy in ("none", "nothing"):
        how = Rematerialization(policy=policy)
        config = dataclasses.replace(dummies.LFM2, rematerialization=how)
        graph, parameters = dummies.unprompted(config)
        path = "decoder/layers/short_convolution/input/kernel"
        trained = {path: parameters.pop(path)}
        found.append(loss_gradient(graph, trained, parameters, batch)[path])
    assert np.abs(found[0]).max(axis=(1, 2)).min() > 1e-4
    np.testing.assert_allclose(*found, atol=1e-6)


def test_a_prefix_and_settings_of_single_layers_are_refused():
    stack = StackShape(5, 2, 4)
    table = Vocabulary(np.zeros((dummies.V, 16), "f4"), None, stack)
    prefix = KeyValuePrefix(jax.random.key(0), table, length=2)
    with pytest.raises(InputError, match="key/value prefix, which needs attention in"):
        build_model(jax.random.key(0), dummies.LFM2, prefix)
    with pytest.raises(
        InputError, match=r"3 of the 3 .* Mamba-2 instead: use StatePre"
    ):
        build_model(jax.random.key(0), dummies.MAMBA2, prefix)
    with pytest.raises(InputError, match=r"LoRA\.layers counts .* leave LoRA\.layers"):
        adapters = [pt.LoRA(rank=2, layers=[1]).build()]
        build_model(jax.random.key(0), dummies.LFM2, adapters=adapters)
    every = Rematerialization(policy="nothing", every=2)
    config = dataclasses.replace(dummies.LFM2, rematerialization=every)
    batch = dummies.make_batch(config, [([4], [3])])
    graph, parameters = dummies.unprompted(config)
    with pytest.raises(InputError, match="skip_first, skip_last, ranges or every"):
        dummies.logits(parameters, batch, graph=graph)


def test_a_model_with_half_a_recurrence_or_without_any_part_is_refused():
    with pytest.raises(InputError, match="feed_forward_width is 0, which is for"):
        dataclasses.replace(dummies.LLAMA, feed_forward_width=0)
    with pytest.raises(InputError, match="beside_attention needs recurrent_layers"):
        dataclasses.replace(dummies.LLAMA, recurrence_beside_attention=True)
    with pytest.raises(InputError, match="recurrent_norms_before needs recurrent_lay"):
        dataclasses.replace(dummies.LFM2, recurrent_norms_before=True)
    with pytest.raises(InputError, match="recurrent layers need a recurrence"):
        dataclasses.replace(dummies.LFM2, convolution_width=0)
    with pytest.raises(InputError, match=r"recurrent_layers is .* 0 to 4"):
        dataclasses.replace(dummies.LFM2, recurrent_layers=(5,))
    with pytest.raises(InputError, match=r"'mamba', and no other.* 'mamba2', 2 and"):
        dataclasses.replace(dummies.MAMBA2, step_rank=2)
