"""Which tokens can be drawn, against filters in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.generation.sampling import greedy, temperature_sampler

DRAWS = 4000
LOGITS = np.random.default_rng(3).normal(scale=1.5, size=12)


def distribution(temperature, top_k=None, top_p=None) -> np.ndarray:
    """The probabilities of the tokens, token by token from the most probable one."""
    weights = np.exp(LOGITS / temperature)
    order = sorted(range(len(weights)), key=lambda token: -weights[token])[:top_k]
    total, kept, sum_before = sum(weights[t] for t in order), [], 0.0
    for token in order:
        if top_p is not None and sum_before >= top_p:
            break
        kept.append(token)
        sum_before += weights[token] / total
    chances = np.zeros(len(weights))
    chances[kept] = weights[kept]
    return chances / chances.sum()


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.8},
        {"temperature": 0.8, "top_k": 3},
        {"temperature": 1.3, "top_p": 0.6},
        {"temperature": 1.3, "top_k": 4, "top_p": 0.8},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 1.0, "top_k": 50, "top_p": 1.0},
    ],
)
def test_tokens_are_drawn_with_their_probabilities(settings):
    sampler = temperature_sampler(**settings)
    rows = jnp.tile(jnp.asarray(LOGITS, jnp.float32), (DRAWS, 1))
    drawn = jax.jit(sampler)(rows, jax.random.split(jax.random.key(0), DRAWS))
    counts = np.bincount(drawn, minlength=len(LOGITS))
    expected = distribution(**settings)
    assert not counts[expected == 0].any()
    # Five standard deviations of a share of that many draws.
    allowed = 5 * np.sqrt(expected * (1 - expected) / DRAWS)
    assert (np.abs(counts / DRAWS - expected) <= allowed).all()


def test_equal_settings_are_one_sampler():
    assert temperature_sampler(0.5, 3) == temperature_sampler(0.5, 3)
    assert temperature_sampler(0) is greedy


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": 1, "top_k": 0}, "top_k is 0"),
        ({"temperature": 1, "top_p": 0.0}, "top_p is 0.0"),
        ({"temperature": 1, "top_p": 1.5}, "top_p is 1.5"),
        ({"temperature": 0, "top_k": 3}, "have no effect"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        temperature_sampler(**settings)
