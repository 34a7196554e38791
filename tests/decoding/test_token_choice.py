# transformers is in the `bench` extra only.
# pyright: reportMissingImports=false

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.decoding import token_choice
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.decoding.token_choice import Needs, RowChoices, TokenNumbers

B, V = 6, 23
NUMBERS = np.random.default_rng(0).normal(size=(B, V)).astype(np.float32) * 2
LOGITS = jnp.asarray(NUMBERS)


def choices(count: int = B, **changes) -> RowChoices:
    """Neutral settings of all rows with some changed."""
    neutral = RowChoices(
        *(np.zeros(count, np.float32), np.zeros(count, np.int32)),
        *(np.ones(count, np.float32), np.zeros(count, np.float32)),
        *(np.ones(count, np.float32), np.zeros(count, np.float32)),
        *(np.zeros(count, np.float32), np.zeros(count, np.uint32)),
        *(np.zeros(count, np.uint32), np.zeros(count, np.int32)),
        *(np.zeros(count, np.int32),),
        *(np.full(count, -1, np.int32), np.full((count, 4), -1, np.int32)),
        *(np.zeros(count, bool), np.zeros(count, bool)),
    )
    return neutral._replace(
        **{
            name: np.full_like(getattr(neutral, name), value)
            if np.ndim(value) == 0
            else value
            for name, value in changes.items()
        }
    )


@pytest.mark.exhaustive
def test_options_that_no_row_uses_change_no_bit():
    shape = (B, V)
    numbers = TokenNumbers(
        jnp.zeros(shape, bool), jnp.zeros(shape, jnp.int32), jnp.zeros(shape)
    )
    drawn = choices(temperature=0.7, step=np.arange(B, dtype=np.int32))
    plain = token_choice.choose_tokens(LOGITS, drawn, None, Needs(sampled=True))
    every = token_choice.choose_tokens(LOGITS, drawn, numbers, Needs(*[True] * 5))
    np.testing.assert_array_equal(plain.tokens, every.tokens)


def test_unlike_settings_share_a_program_that_has_their_options():
    drawn, logprobs, every = Needs(True), Needs(logprobs=True), Needs(*[True] * 6)
    programs = [Needs(), drawn, drawn.union(logprobs)]
    assert token_choice.program_for(drawn, programs) == drawn
    assert token_choice.program_for(logprobs, programs) == programs[2]
    # The first row whose options no program has compiles the last one.
    for needs in (Needs(masked=True), Needs(penalized=True)):
        assert token_choice.program_for(needs, programs) == programs[3] == every
    assert len(programs) == 4
    assert token_choice.program_for(drawn, []) == drawn


CASES: dict[str, tuple[Callable, Callable]] = {
    "repetition": (
        lambda x, ids: token_choice.penalize_repetition(x, _seen(ids), np.full(B, 1.3)),
        lambda t: t.RepetitionPenaltyLogitsProcessor(1.3),
    ),
    "temperature": (
        lambda x, _: token_choice.scale_by_temperature(x, np.full(B, 0.6)),
        lambda t: t.TemperatureLogitsWarper(0.6),
    ),
    "top_k": (
        lambda x, _: token_choice.keep_highest(x, np.full(B, 5)),
        lambda t: t.TopKLogitsWarper(5),
    ),
    "top_p": (
        lambda x, _: token_choice.keep_nucleus(x, np.full(B, 0.8)),
        lambda t: t.TopPLogitsWarper(0.8),
    ),
    "min_p": (
        lambda x, _: token_choice.keep_likely(x, np.full(B, 0.1)),
        lambda t: t.MinPLogitsWarper(0.1),
    ),
}


def _seen(ids: np.ndarray) -> jax.Array:
    marks = np.zeros((B, V), bool)
    marks[np.arange(B)[:, None], ids] = True
    return jnp.asarray(marks)


@pytest.mark.torch
@pytest.mark.parametrize("name", CASES)
def test_options_are_those_of_transformers(name):
    import torch
    from transformers.generation import logits_process as processors

    ours, theirs = CASES[name]
    ids = np.random.default_rng(1).integers(0, V, (B, 4))
    expected = theirs(processors)(torch.tensor(ids), torch.tensor(NUMBERS)).numpy()
    np.testing.assert_allclose(ours(LOGITS, ids), expected, rtol=1e-6)


def distribution(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The distribution that settings mean, by NumPy in float64."""
    scores = logits.astype(np.float64) / sampling.temperature
    order = np.argsort(-scores)
    probabilities = np.exp(scores - scores.max())
    if sampling.top_k is not None:
        probabilities[order[sampling.top_k :]] = 0
    probabilities /= probabilities.sum()
    if sampling.top_p is not None:
        before = np.cumsum(probabilities[order]) - probabilities[order]
        probabilities[order[before >= sampling.top_p]] = 0
        probabilities /= probabilities.sum()
    if sampling.min_p is not None:
        probabilities[probabilities < sampling.min_p * probabilities.max()] = 0
    return probabilities / probabilities.sum()


# The 0.999 quantiles of chi-square by degrees of freedom (Abramowitz and Stegun 1964,
# table 26.8).
CRITICAL = {2: 13.816, 3: 16.266, 4: 18.467, 5: 20.515, 6: 22.458, 22: 48.268}

SETTINGS = [
    Sampling(temperature=1.0, top_k=5),
    Sampling(temperature=1.0),
    Sampling(temperature=0.6, top_p=0.8),
    Sampling(temperature=1.3, min_p=0.3),
    Sampling(temperature=1.5, top_k=6, top_p=0.9, min_p=0.05),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("sampling", SETTINGS)
def test_frequencies_are_those_of_the_distribution(sampling):
    draws, steps = 2000, 50
    draw = jax.jit(
        lambda logits, step: (
            token_choice.choose_tokens(
                logits,
                choices(
                    draws,
                    temperature=sampling.temperature,
                    top_k=sampling.top_k or 0,
                    top_p=1.0 if sampling.top_p is None else sampling.top_p,
                    min_p=sampling.min_p or 0.0,
                    seed=7,
                    sample=np.arange(draws, dtype=np.int32),
                )._replace(step=step),
                None,
                Needs(sampled=True, truncated=True),
            ).tokens
        )
    )
    logits = jnp.tile(LOGITS[0], (draws, 1))
    counts = np.zeros(V)
    for step in range(steps):
        tokens = np.asarray(draw(logits, np.full(draws, step, np.int32)))
        counts += np.bincount(tokens, minlength=V)
    expected = distribution(NUMBERS[0], sampling) * draws * steps
    assert not counts[expected == 0].any()
    inside = expected > 0
    statistic = ((counts - expected)[inside] ** 2 / expected[inside]).sum()
    assert statistic < CRITICAL[int(inside.sum()) - 1]


def test_penalties_are_subtracted_as_openai_defines_them():
    counts = np.zeros((B, V), np.int32)
    counts[:, 3], counts[:, 4] = 1, 5
    generated = jnp.asarray(counts)
    present = token_choice.penalize_presence(LOGITS, generated, np.full(B, 0.5))
    frequent = token_choice.penalize_frequency(LOGITS, generated, np.full(B, 0.5))
    for (token, count), row in itertools.product({3: 1, 4: 5, 5: 0}.items(), range(B)):
        lower = NUMBERS[row, token] - 0.5 * (count > 0)
        np.testing.assert_allclose(present[row, token], lower, rtol=1e-6)
        lower = NUMBERS[row, token] - 0.5 * count
        np.testing.assert_allclose(frequent[row, token], lower, rtol=1e-6)


@pytest.mark.parametrize(
    "numbers",
    [
        {"temperature": 1e-40},
        {"temperature": 1.0, "top_p": 1e-50},
        {"repetition_penalty": 1e39},
        {"repetition_penalty": 1e-42},
        {"presence_penalty": -1e39},
        {"frequency_penalty": float("nan")},
        {"logit_bias": {3: 1e39}},
    ],
    ids=str,
)
def test_numbers_that_float32_cannot_hold_are_refused(numbers):
    with pytest.raises(InputError, match=list(numbers)[-1]):
        Sampling(**numbers)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": 1, "top_k": 0}, "top_k is 0"),
        ({"temperature": 1, "top_p": 0.0}, "top_p is 0.0"),
        ({"temperature": 1, "top_p": 1.5}, "top_p is 1.5"),
        ({"temperature": 0, "top_k": 3}, "has no effect"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        Sampling(**settings)
