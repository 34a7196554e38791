"""Compares the FLOPs of a step with a manual count."""

import dataclasses
import functools
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest

from prompt_tuning.core import parameter_groups
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.rematerialization import Rematerialization
from prompt_tuning.settings.prompting import Prompting
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step import train_step
from scripts.bench import hlo
from tests.support import dummies

B, T, P, M_PER_ROW = 8, 64, 20, 32


def bundled_size(config: ModelConfig) -> ModelConfig:
    """Returns the family's config with the sizes of the bundled models."""
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


FAMILIES = {family: bundled_size(config) for family, config in dummies.FAMILIES.items()}
CONFIGS = FAMILIES | {
    "llama, rematerialized": dataclasses.replace(
        FAMILIES["llama"], rematerialization=Rematerialization(policy="nothing")
    )
}


@functools.cache
def compiled_step(
    family: str,
    regex: str = r".*/prompt/.*",
    prompting: Prompting | None = None,
    accumulate: int = 1,
):
    """Compiles the step that trains the parameters that match the expression."""
    config = CONFIGS[family]
    graph, parameters = dummies.prompted(config, length=P, prompting=prompting)
    given = T if config.architecture == "encoder_decoder" else T - M_PER_ROW
    rows = dummies.random_rows([(given, M_PER_ROW)] * B)
    batch = dummies.make_batch(config, rows)
    if accumulate > 1:
        batch = jax.tree.map(lambda x: x.reshape(accumulate, -1, *x.shape[1:]), batch)
    groups = [
        parameter_groups.ParameterGroup((regex,), parameter_groups.adafactor(0.3))
    ]
    labels = parameter_groups.label(parameters, groups)
    trained, frozen = parameter_groups.partition(parameters, labels)
    optimizer = parameter_groups.group_optimizer(groups, labels)
    state = TrainState.create(trained, optimizer, jax.random.key(0))
    step = jax.jit(
        functools.partial(train_step, graph=graph, optimizer=optimizer, dropout=False)
    )
    return step.lower(state, frozen, batch).compile()


def step_flops(*arguments, **choices) -> int:
    """Returns the FLOPs of that step."""
    return hlo.matmul_flops(compiled_step(*arguments, **choices))


def projections(config: ModelConfig) -> int:
    """Returns the numbers of weights of one feed-forward layer and one attention."""
    inner = config.heads * config.head_width
    shared = config.key_value_heads * config.head_width
    attention = config.width * (2 * inner + 2 * shared)
    return attention + (3 if config.gated else 2) * config.width * (
        config.feed_forward_width
    )


def attention(config: ModelConfig, pairs: int) -> int:
    """Counts scores and weighted values, each once forward and twice backward."""
    return 2 * 3 * 2 * config.heads * config.head_width * pairs


def head(config: ModelConfig) -> int:
    """Counts logits forward and backward to the hidden states at loss positions."""
    return 2 * 2 * B * M_PER_ROW * config.vocabulary_size * config.width


def decoder_only_by_hand(config: ModelConfig) -> int:
    """The prompt is computed once for the batch, forward and backward."""
    block = 2 * 2 * (P + B * T) * projections(config)
    block += attention(config, P * P + B * T * (P + T))
    return config.layers * block + head(config)


def encoder_decoder_by_hand(config: ModelConfig) -> int:
    """The encoder computes the prompt in each row; gradients pass the decoder."""
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


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_step_has_the_manually_counted_flops(family):
    config = CONFIGS[family]
    expected = BY_HAND[config.architecture](config)
    assert step_flops(family) == pytest.approx(expected, rel=0.02)


def test_a_prompt_step_needs_at_most_70_percent_of_the_flops_of_full_tuning():
    assert step_flops("llama") <= 0.70 * step_flops("llama", ".*")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_micro_batches_compute_the_prompt_once(family):
    assert step_flops(family, accumulate=2) == step_flops(family)


def per_row(shape: tuple[int, ...]) -> bool:
    """Returns whether an array has the model's width for each prompt vector and row."""
    widths = CONFIGS["llama"].width, CONFIGS["llama"].head_width
    in_rows = {B, P} <= set(shape) or B * P in shape
    return in_rows and any(width in shape for width in widths)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_no_array_repeats_the_prompt_for_each_row(family):
    shapes = hlo.array_shapes(compiled_step(family))
    assert not [shape for shape in shapes if per_row(shape)]


def test_a_prompt_that_is_joined_to_rows_is_repeated():
    joined = compiled_step("llama", prompting=Prompting(execution="joined"))
    assert any(per_row(shape) for shape in hlo.array_shapes(joined))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_no_array_has_vocabulary_scores_of_tokens_without_weight(family):
    config = CONFIGS[family]
    sizes = {
        math.prod(shape)
        for shape in hlo.array_shapes(compiled_step(family))
        if config.vocabulary_size in shape
    }
    assert max(sizes) <= max(
        B * M_PER_ROW * config.vocabulary_size, config.vocabulary_size * config.width
    )


@pytest.mark.slow
def test_an_encoders_isolated_prompt_is_computed_once_for_the_batch():
    config = CONFIGS["t5_gated"]
    saved = step_flops("t5_gated") - step_flops(
        "t5_gated", prompting=Prompting(visibility=("prompt->prompt",))
    )
    # The encoder's projections of the prompt for all rows but one.
    least = config.encoder_layers * 2 * 2 * (B - 1) * P * projections(config)
    assert saved >= least


@pytest.mark.slow
def test_rematerialization_recomputes_products_and_keeps_less():
    def cost(family):
        compiled = compiled_step(family)
        memory = cast(Any, compiled.memory_analysis())
        return hlo.matmul_flops(compiled), memory.temp_size_in_bytes

    flops, temporary = cost("llama")
    flops_again, kept_again = cost("llama, rematerialized")
    assert 1.3 * flops < flops_again < 1.6 * flops
    assert kept_again < 0.75 * temporary


@pytest.mark.slow
def test_an_expert_costs_three_products_forward_and_five_backward(monkeypatch):
    """Of the five two recompute what lies between the three products."""
    sizes = {"width": 16, "feed_forward_width": 24, "layers": 2}
    experts = {"experts": 3, "experts_per_token": 2}
    config = dataclasses.replace(CONFIGS["llama"], **sizes, **experts)
    monkeypatch.setitem(CONFIGS, "experts", config)
    product = 2 * (P + B * T) * 16 * 24
    products = hlo.products(compiled_step("experts"))
    runs = sum(one.runs for one in products if one.flops == product)
    assert runs == config.layers * config.experts * (3 + 5)


def test_loops_count_as_often_as_they_run():
    def four_products_forth_and_four_back(x, kernels):
        return jax.lax.scan(lambda x, k: (jnp.tanh(x @ k), None), x, kernels)[0].sum()

    lowered = jax.jit(jax.grad(four_products_forth_and_four_back)).lower(
        jnp.ones((8, 16)), jnp.ones((4, 16, 16))
    )
    flops = hlo.matmul_flops(lowered.compile())
    assert flops == (4 + 4) * 2 * 8 * 16 * 16
