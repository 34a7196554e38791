"""Learning rates by hand."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.learning_rates import (
    warmup_constant,
    warmup_cosine_decay,
    warmup_rsqrt_decay,
)


def values(schedule, *steps: int) -> np.ndarray:
    return np.array([schedule(jnp.asarray(step)) for step in steps])


def test_a_constant_rate_after_a_warmup():
    rates = values(warmup_constant(0.4, warmup_steps=4), 0, 2, 4, 9, 1000)
    np.testing.assert_allclose(rates, [0.1, 0.25, 0.4, 0.4, 0.4], rtol=1e-6)
    np.testing.assert_allclose(values(warmup_constant(0.4, warmup_steps=0), 0), [0.4])


def test_half_a_cosine_from_the_peak_to_a_fraction():
    schedule = warmup_cosine_decay(1.0, 104, warmup_steps=4, final_fraction=0.2)
    share = 0.5 * (1 + math.cos(math.pi / 4))
    expected = [0.25, 1.0, 0.2 + 0.8 * share, 0.6, 0.2]
    rates = values(schedule, 0, 4, 29, 54, 104)
    np.testing.assert_allclose(rates, expected, rtol=1e-6)


def test_the_inverse_root_of_the_step():
    schedule = warmup_rsqrt_decay(0.5, warmup_steps=100)
    rates = values(schedule, 100, 400, 2500)
    np.testing.assert_allclose(rates, [0.5, 0.25, 0.1], rtol=1e-6)


def test_a_warmup_that_is_too_short_is_refused():
    with pytest.raises(InputError, match="warmup_steps is -1, expected at least 0"):
        warmup_constant(0.1, warmup_steps=-1)
    with pytest.raises(InputError, match="warmup_steps is 0, expected at least 1"):
        warmup_rsqrt_decay(0.1, warmup_steps=0)
