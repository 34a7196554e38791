"""Trained initial states: what they mean, their gradients, and sweeps of them."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.layer_kinds import check_all_attention
from prompt_tuning.core.parameters import merge
from prompt_tuning.models.build import build_model
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.pretrained.fresh_parameters import initialized_by
from prompt_tuning.pretrained.tuning import Tuning, stack_shape
from prompt_tuning.prompts.initializers import Vocabulary, from_text
from prompt_tuning.prompts.state_prefix import StatePrefix
from prompt_tuning.training.gradients import gradients
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step import prompt_norm
from tests.support import dummies
from tests.support.exhaustive import sample
from tests.training.test_sweep_step import (
    check_equal,
    computed_in_float64,
    run_alone,
    run_together,
)

LENGTH = 3
TRAINED = ("decoder/prompt/prompt", "decoder/prompt/state")
CONFIGS = {
    **{"lfm2": dummies.LFM2, "granite4": dummies.GRANITE4},
    **{"jamba": dummies.JAMBA, "minimax": dummies.MINIMAX},
    # With the states of granite4, beside attention and in every layer.
    **{"falcon_h1": dummies.FALCON_H1, "mamba2": dummies.MAMBA2},
}


def with_prefix(config):
    """Returns the structure of a model with a prefix, and its parameters."""
    table = np.zeros((dummies.V, config.width), "f4")
    vocabulary = Vocabulary(table, None, stack_shape(config, config.layers))
    prefix = StatePrefix(jax.random.key(0), vocabulary, length=LENGTH)
    graph, parameters = dummies.with_numbers(
        lambda key: build_model(key, config, prefix)
    )
    return graph, parameters


def divided(parameters):
    trained = {path: parameters[path] for path in TRAINED}
    return trained, {p: x for p, x in parameters.items() if p not in TRAINED}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_text_after_the_keys_and_states_of_tokens_is_as_after_the_tokens(name):
    config = CONFIGS[name]
    graph, parameters = with_prefix(config)
    plain = dummies.abstract(lambda key: build_model(key, config))[0]
    _, frozen = divided(parameters)
    tokens, model = [3, 1, 4, 1, 5], cast(LanguageModel, merge(plain, frozen))
    read = jax.jit(lambda row: model.prefill(row, jnp.array([LENGTH]), 1)[1])
    cache = read(jnp.array([tokens[:LENGTH]]))
    keys = jnp.stack(cache.past[-1].key_values, axis=1)  # [L, 2, G, 1, P, K]
    memory: Any = cache.state
    states = [x.reshape(len(x), -1) for x in memory if x is not None]
    given = {
        TRAINED[0]: keys[:, :, :, 0].swapaxes(2, 3),
        TRAINED[1]: jnp.concatenate(states, axis=1),
    }

    def after(graph, parameters, tokens):
        batch = dummies.make_batch(config, [(tokens, [9, 2, 6])])
        return dummies.logits(parameters, batch, graph=graph)

    whole = after(plain, frozen, tokens)
    rest = after(graph, frozen | given, tokens[LENGTH:])
    np.testing.assert_allclose(rest, whole, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", sample(4, CONFIGS))
def test_gradients_are_finite_differences_in_float64(name, monkeypatch):
    config = CONFIGS[name]
    graph, parameters = with_prefix(config)
    monkeypatch.setattr(jnp, "float32", jnp.float64)
    with jax.enable_x64(True):
        config = computed_in_float64(config)
        graph = with_prefix(config)[0]
        parameters = {path: x.astype(jnp.float64) for path, x in parameters.items()}
        trained, frozen = divided(parameters)
        random = np.random.default_rng(0)

        def drawn():
            shapes = {path: x.shape for path, x in trained.items()}
            return {p: jnp.asarray(random.normal(size=x)) for p, x in shapes.items()}

        trained, way = drawn(), drawn()
        batch = dummies.make_batch(config, [([4, 2, 7], [3, 1]), ([5], [6, 2])])
        compute = jax.jit(gradients, static_argnums=0)
        gradient, _ = compute(graph, trained, frozen, batch, None)
        for path in [path for path in TRAINED if trained[path].size]:
            ends = []
            for step in (1e-4, -1e-4):
                moved = trained | {path: trained[path] + step * way[path]}
                ends.append(compute(graph, moved, frozen, batch, None)[1][0])
            slope = (ends[0] - ends[1]) / 2e-4 / batch.loss_weights.sum()
            assert abs(slope) > 1e-3
            expected = jnp.sum(gradient[path] * way[path])
            np.testing.assert_allclose(slope, expected, rtol=1e-6)


@pytest.mark.slow
def test_a_sweep_trains_each_member_as_alone():
    config = dummies.GRANITE4
    graph, parameters = with_prefix(config)
    trained, frozen = divided(parameters)
    # Other starts of the same step: alone, both are one program.
    chosen = [optax.sgd(0.1)] * 2
    starts = [trained, {path: x / 2 for path, x in trained.items()}]
    states = [
        TrainState.create(start, each, jax.random.key(0))
        for start, each in zip(starts, chosen, strict=True)
    ]
    batch = dummies.make_batch(config, dummies.random_rows([(4, 3), (1, 5)]))
    alone = [
        run_alone(graph, state, frozen, each, [batch] * 2)
        for state, each in zip(states, chosen, strict=True)
    ]
    together = run_together(
        graph, states, frozen, chosen, [batch] * 2, own_batches=False
    )
    check_equal(together, alone, 1e-6, 1e-6)


def test_a_prefix_without_keys_has_no_norm():
    assert prompt_norm({TRAINED[0]: jnp.zeros((0, 2, LENGTH, 2, 4))}) == 0


def test_a_model_without_states_and_a_start_from_a_text_are_refused():
    table = np.zeros((dummies.V, 16), "f4")
    stack = stack_shape(dummies.LLAMA, dummies.LLAMA.layers)
    with pytest.raises(InputError, match="has none: use KeyValuePrefix"):
        StatePrefix(jax.random.key(0), Vocabulary(table, None, stack), length=2)
    stack = stack_shape(dummies.LFM2, dummies.LFM2.layers)
    vocabulary = Vocabulary(table, dummies.LetterTokenizer(), stack)
    with pytest.raises(InputError, match="StatePrefix cannot start from a text"):
        StatePrefix(
            jax.random.key(0), vocabulary, length=2, initializer=from_text("a b c")
        )


def test_messages_name_the_start_of_states_and_the_mixer_of_a_model():
    states = initialized_by(TRAINED[1], Tuning())
    assert states == "zero, as in the model without a prompt"
    message = "2 of the 3 layers of this model have Mamba-2 instead: use LoRA"
    with pytest.raises(InputError, match=message):
        check_all_attention(dummies.GRANITE4, "a prefix", "use LoRA")
    message = "alone in every layer, but 3 of the 3 .* have Mamba-2 beside it: use LoRA"
    with pytest.raises(InputError, match=message):
        check_all_attention(dummies.FALCON_H1, "a prefix", "use LoRA")
