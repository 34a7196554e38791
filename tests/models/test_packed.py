"""Packed rows: each example is computed as in its own row, with any prompt."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.data.batching.batch_plan import PlannedBatch
from prompt_tuning.data.batching.batches import build_batch
from prompt_tuning.data.examples.row_readers import Example
from prompt_tuning.models.build import build_model
from prompt_tuning.pretrained.tuning import stack_shape
from prompt_tuning.prompts.deep import AddedDeepPrompt, DeepPrompt
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.prompts.input_dependent import InstancePrompt
from prompt_tuning.prompts.prefix import KeyValuePrefix
from prompt_tuning.prompts.soft import SoftPrompt, StackedPrompts
from prompt_tuning.prompts.state_prefix import StatePrefix
from prompt_tuning.settings.prompting import Prompting
from prompt_tuning.training.gradients import gradients
from tests.support import dummies
from tests.support.exhaustive import sample

N, P = 3, dummies.P
SIZES = [(4, 3), (2, 5), (3, 1), (1, 2), (5, 2)]
PROMPT_IDS = [0, 1, 2, 1, 0]
# The second row holds three examples, the first two and padding after them.
PACKED = np.array([[0, 1, -1], [2, 3, 4]])


compute = jax.jit(gradients, static_argnums=0)


def vocabulary(config):
    stack = stack_shape(config, config.layers)
    return Vocabulary(np.zeros((dummies.V, config.width), "f4"), None, stack)


def deep(config, kind=DeepPrompt):
    return kind(jax.random.key(0), vocabulary(config), length=P)


def several_prompts(config):
    return StackedPrompts(jnp.zeros((N, P, config.width)))


def single_prompt(config):
    return SoftPrompt(jax.random.key(0), vocabulary(config), length=P)


def instance(config):
    return InstancePrompt(jax.random.key(0), vocabulary(config), length=P)


def prefix(config):
    return KeyValuePrefix(jax.random.key(0), vocabulary(config), length=P)


def state_prefix(config):
    return StatePrefix(jax.random.key(0), vocabulary(config), length=P)


LLAMA, T5 = dummies.LLAMA, dummies.T5_GATED
ISOLATED = Prompting(visibility=("prompt->prompt",))
WAYS = {
    "llama": (LLAMA, several_prompts, None, {}),
    "lfm2": (dummies.LFM2, several_prompts, None, {}),
    "qwen3.5 suffix": (dummies.QWEN3_5, several_prompts, Prompting("suffix"), {}),
    "qwen3.5": (dummies.QWEN3_5, several_prompts, None, {}),
    "granite4": (dummies.GRANITE4, several_prompts, None, {}),
    "granite4 state": (dummies.GRANITE4, state_prefix, None, {}),
    "falcon h1": (dummies.FALCON_H1, several_prompts, None, {}),
    "falcon h1 key/value prefix": (dummies.FALCON_H1, prefix, None, {}),
    "mamba2 state": (dummies.MAMBA2, state_prefix, None, {}),
    "jamba": (dummies.JAMBA, several_prompts, None, {}),
    "minimax": (dummies.MINIMAX, several_prompts, None, {}),
    "minimax state": (dummies.MINIMAX, state_prefix, None, {}),
    "jamba state": (dummies.JAMBA, state_prefix, None, {}),
    "lfm2 suffix": (dummies.LFM2, several_prompts, Prompting("suffix"), {}),
    "lfm2 instance": (dummies.LFM2, instance, None, {}),
    "lfm2 deep": (dummies.LFM2, deep, None, {}),
    "gemma4": (dummies.GEMMA4, several_prompts, None, {}),
    "gemma4 suffix": (dummies.GEMMA4, several_prompts, Prompting("suffix"), {}),
    "gemma4 instance": (dummies.GEMMA4, instance, None, {}),
    "gemma4 key/value prefix": (dummies.GEMMA4, prefix, None, {}),
    "llama joined": (LLAMA, several_prompts, Prompting(execution="joined"), {}),
    "gpt2 suffix": (dummies.GPT2, several_prompts, Prompting("suffix"), {}),
    "llama after bos": (LLAMA, several_prompts, Prompting("after_bos"), {}),
    "llama prefix attention": (
        LLAMA,
        several_prompts,
        Prompting(prefix_attention=True),
        {},
    ),
    "llama prefix attention, blind": (
        LLAMA,
        several_prompts,
        Prompting(prefix_attention=True, visibility=()),
        {},
    ),
    "llama deep": (LLAMA, deep, None, {}),
    "llama deep suffix": (LLAMA, deep, Prompting("suffix"), {}),
    "llama instance": (LLAMA, instance, None, {}),
    "llama instance suffix": (LLAMA, instance, Prompting("suffix"), {}),
    "t5 instance": (T5, instance, None, {}),
    "llama key/value prefix": (LLAMA, prefix, None, {}),
    "gpt2 key/value prefix": (dummies.GPT2, prefix, None, {}),
    "t5": (T5, several_prompts, None, {}),
    "t5 suffix": (T5, several_prompts, Prompting("suffix"), {}),
    "t5 isolated": (T5, several_prompts, ISOLATED, {}),
    "t5 causal": (
        T5,
        several_prompts,
        Prompting(visibility=("prompt->prompt;causal",)),
        {},
    ),
    "t5 deep": (T5, functools.partial(deep, kind=AddedDeepPrompt), None, {}),
    "t5 both": (T5, several_prompts, None, {"decoder_prompt": several_prompts}),
    "t5 several and one": (
        T5,
        several_prompts,
        None,
        {"decoder_prompt": single_prompt},
    ),
    "t5 one and several": (
        T5,
        single_prompt,
        None,
        {"decoder_prompt": several_prompts},
    ),
    "t5 one isolated and several": (
        T5,
        single_prompt,
        ISOLATED,
        {"decoder_prompt": several_prompts},
    ),
    "t5 prefixes": (T5, prefix, None, {"decoder_prompt": prefix}),
}


def model(way):
    config, prompt, prompting, others = WAYS[way]
    others = {name: make(config) for name, make in others.items()}
    return dummies.with_numbers(
        lambda key: build_model(key, config, prompt(config), prompting, **others)
    )


def examples(config):
    rows = zip(dummies.random_rows(SIZES), PROMPT_IDS, strict=True)
    for (given, completion), prompt_id in rows:
        if config.architecture == "encoder_decoder":
            targets, inputs, first = completion, given, 0
        else:
            targets = inputs = given + completion
            first = len(given)
        weights = np.zeros(len(targets), np.float32)
        weights[first:] = 1
        arrays = (np.array(inputs, np.int32), np.array(targets, np.int32), weights)
        yield Example(*arrays, first, prompt_id)


def has_several_prompts(way):
    _, prompt, _, others = WAYS[way]
    return several_prompts in (prompt, *others.values())


def batch_of(way, rows):
    config = WAYS[way][0]
    planned = PlannedBatch(
        rows, 16, 16, 12, same_tokens=config.architecture == "decoder_only"
    )
    return build_batch(
        list(examples(config)), planned, 0, prompt_ids=has_several_prompts(way)
    )


@pytest.mark.slow
@pytest.mark.parametrize("way", sample(3, WAYS))
def test_packed_examples_are_computed_as_if_each_had_its_own_row(way):
    graph, parameters = model(way)
    trained = {
        path: parameters.pop(path) for path in list(parameters) if "/prompt/" in path
    }
    actual, sums = compute(graph, trained, parameters, batch_of(way, PACKED), None)
    rows = np.arange(len(SIZES))
    expected, expected_sums = compute(
        graph, trained, parameters, batch_of(way, rows), None
    )
    assert sums.weight == expected_sums.weight == sum(size[1] for size in SIZES)
    np.testing.assert_allclose(sums.loss, expected_sums.loss, rtol=1e-5)
    for path, gradient in expected.items():
        if not gradient.size:  # keys and values of no layers
            continue
        assert np.abs(gradient).max() > 1e-4
        np.testing.assert_allclose(actual[path], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
def test_a_single_prompt_learns_from_examples_of_all_tasks():
    # One prompt in two ways: all examples in one batch, and each in its own batch.
    graph, parameters = model("t5 one isolated and several")
    path = "encoder/prompt/prompt"
    trained = {path: parameters.pop(path)}
    whole, sums = compute(
        graph, trained, parameters, batch_of("t5 both", np.arange(5)), None
    )
    alone = np.zeros_like(whole[path])
    for row in range(5):
        batch = batch_of("t5 both", np.array([row]))
        gradient, own_sums = compute(graph, trained, parameters, batch, None)
        assert np.abs(gradient[path]).max() > 1e-4
        alone += gradient[path] * own_sums.weight
    np.testing.assert_allclose(whole[path] * sums.weight, alone, atol=1e-5)
