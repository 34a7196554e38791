"""What a step multiplies, against a count by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from prompt_tuning import optim
from prompt_tuning.models.config import ModelConfig
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step import train_step
from scripts import hlo
from tests import dummies

pytestmark = pytest.mark.usefixtures("quick_compile")

B, T, P, M_PER_ROW = 8, 64, 20, 32


def widened(config: ModelConfig) -> ModelConfig:
    """The same family in the shape of the bundled models."""
    return dataclasses.replace(
        config,
        width=128,
        layers=4,
        encoder_layers=4 if config.encoder_layers else 0,
        feed_forward_width=344,
        heads=4,
        key_value_heads=4,
        head_width=32,
        vocabulary_size=100,
        maximum_positions=128,
    )


CONFIGS = {family: widened(config) for family, config in dummies.FAMILIES.items()}


@functools.cache
def step_flops(family: str, regex: str = r".*/prompt/.*") -> int:
    """FLOPs of the compiled step that trains what the expression matches."""
    config = CONFIGS[family]
    graph, parameters = dummies.prompted(config, length=P)
    given = T if config.architecture == "encoder_decoder" else T - M_PER_ROW
    rows = dummies.random_rows([(given, M_PER_ROW)] * B)
    batch = dummies.make_batch(config, rows)
    groups = [optim.ParameterGroup((regex,), optim.adafactor(0.3))]
    labels = optim.label(parameters, groups)
    trained, frozen = optim.partition(parameters, labels)
    optimizer = optim.group_optimizer(groups, labels)
    state = TrainState.create(trained, optimizer, jax.random.key(0))
    step = jax.jit(
        functools.partial(train_step, graph=graph, optimizer=optimizer, dropout=False)
    )
    return hlo.matmul_flops(step.lower(state, frozen, batch).compile())


def projections(config: ModelConfig) -> int:
    """Weights of one block's feed-forward layer and of one attention."""
    inner = config.heads * config.head_width
    shared = config.key_value_heads * config.head_width
    attention = config.width * (2 * inner + 2 * shared)
    return attention + (3 if config.gated else 2) * config.width * (
        config.feed_forward_width
    )


def attention(config: ModelConfig, pairs: int) -> int:
    """Scores and mixing of values, forward once and backward twice each."""
    return 2 * 3 * 2 * config.heads * config.head_width * pairs


def head(config: ModelConfig) -> int:
    """Logits forward, and back to the hidden states, where there is a loss."""
    return 2 * 2 * B * M_PER_ROW * config.vocabulary_size * config.width


def decoder_only_by_hand(config: ModelConfig) -> int:
    """The prompt goes through once for the batch; each matrix is met forth and back."""
    block = 2 * 2 * (P + B * T) * projections(config)
    block += attention(config, P * P + B * T * (P + T))
    return config.layers * block + head(config)


def encoder_decoder_by_hand(config: ModelConfig) -> int:
    """The prompt goes through the encoder in each row; the decoder leads back to it."""
    S, U = P + T, M_PER_ROW
    one_attention = 4 * config.width * config.heads * config.head_width
    encoder = 2 * 2 * B * S * projections(config) + attention(config, B * S * S)
    # Cross attention: queries and outputs of targets, keys and values of the encoder.
    decoder = 2 * 2 * B * U * (projections(config) + one_attention // 2)
    decoder += 2 * 2 * B * S * one_attention // 2
    decoder += attention(config, B * U * U + B * U * S)
    return config.encoder_layers * encoder + config.layers * decoder + head(config)


BY_HAND = {
    "decoder_only": decoder_only_by_hand,
    "encoder_decoder": encoder_decoder_by_hand,
}


@pytest.mark.parametrize("family", CONFIGS)
def test_a_prompt_step_multiplies_what_a_hand_counts(family):
    config = CONFIGS[family]
    expected = BY_HAND[config.architecture](config)
    assert step_flops(family) == pytest.approx(expected, rel=0.02)


def test_a_prompt_step_multiplies_at_most_70_percent_of_full_tuning():
    assert step_flops("llama") <= 0.70 * step_flops("llama", ".*")


def test_loops_count_as_often_as_they_run():
    def four_products_forth_and_four_back(x, kernels):
        return jax.lax.scan(lambda x, k: (jnp.tanh(x @ k), None), x, kernels)[0].sum()

    lowered = jax.jit(jax.grad(four_products_forth_and_four_back)).lower(
        jnp.ones((8, 16)), jnp.ones((4, 16, 16))
    )
    flops = hlo.matmul_flops(lowered.compile())
    assert flops == (4 + 4) * 2 * 8 * 16 * 16
