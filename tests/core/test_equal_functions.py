"""Functions that are compared by what they hold."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prompt_tuning.core.equal_functions import EqualFunction
from prompt_tuning.core.learning_rates import warmup_cosine_decay
from prompt_tuning.core.parameter_groups import ParameterGroup, adamw, group_optimizer


def multiplied_by(factor):
    return lambda x: x * factor


def update(peak, path="prompt"):
    group = ParameterGroup([".*"], adamw(warmup_cosine_decay(peak, 100), clip_norm=1.0))
    return EqualFunction(group_optimizer([group], {path: 0}).update)


def test_optimizers_of_equal_settings_are_equal():
    assert update(0.1) == update(0.1)
    assert hash(update(0.1)) == hash(update(0.1))
    assert EqualFunction(optax.lion(0.1).update) == EqualFunction(
        optax.lion(0.1).update
    )


@pytest.mark.parametrize("other", [update(0.2), update(0.1, path="prefix")])
def test_optimizers_of_other_settings_or_parameters_differ(other):
    assert update(0.1) != other


@pytest.mark.parametrize(("one", "other"), [(0, 0.0), (0.0, -0.0), (1, True)])
def test_numbers_that_compute_other_bits_differ(one, other):
    assert EqualFunction(multiplied_by(one)) != EqualFunction(multiplied_by(other))


@pytest.mark.parametrize(
    "held", [np.ones(2), jnp.ones(2), object(), {"array": np.ones(2)}]
)
def test_what_holds_arrays_or_unknown_objects_is_refused(held):
    with pytest.raises(TypeError):
        EqualFunction(multiplied_by(held))


def test_a_function_that_calls_itself_is_described():
    def countdown():
        def count(n):
            return n and count(n - 1)

        return count

    assert EqualFunction(countdown()) == EqualFunction(countdown())
