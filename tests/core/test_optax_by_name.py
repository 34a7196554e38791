"""Transformations by name against optax's own functions."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.optax_by_name import optax_chain, optax_transformation
from prompt_tuning.core.parameter_groups import adafactor, adamw

PARAMETERS = {"prompt": jnp.arange(1.0, 7.0).reshape(2, 3)}


def updated(transformation: optax.GradientTransformation) -> np.ndarray:
    """Returns the parameters after two steps."""
    state = transformation.init(PARAMETERS)
    parameters: Any = PARAMETERS
    for step in range(2):
        gradient = {"prompt": jnp.sin(parameters["prompt"] + step)}
        updates, state = transformation.update(gradient, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
    return np.asarray(parameters["prompt"])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            optax_transformation("lion", {"b1": 0.8}, 0.1),
            optax.lion(0.1, b1=0.8),
        ),
        (
            optax_transformation("sgd", {"momentum": 0.9, "nesterov": True}, 0.1),
            optax.sgd(0.1, momentum=0.9, nesterov=True),
        ),
        (
            optax_chain([optax_transformation("clip", {"max_delta": 0.1}), adamw(0.1)]),
            optax.chain(optax.clip(0.1), optax.adamw(0.1, weight_decay=0)),
        ),
        (
            adamw(0.1, b1=0.5, b2=0.6, eps=0.1, eps_root=0.2, nesterov=True),
            optax.adamw(
                0.1, 0.5, 0.6, eps=0.1, eps_root=0.2, weight_decay=0, nesterov=True
            ),
        ),
        (
            adafactor(
                0.1,
                decay_rate=0.5,
                decay_offset=1,
                multiply_by_parameter_scale=True,
                clipping_threshold=None,
                momentum=0.5,
                weight_decay_rate=None,
                eps=0.1,
                min_dim_size_to_factor=2,
            ),
            optax.adafactor(
                0.1, 2, 0.5, 1, True, None, 0.5, weight_decay_rate=None, eps=0.1
            ),
        ),
    ],
    ids=["lion", "sgd", "chain", "adamw", "adafactor"],
)
def test_transformations_are_optaxs(ours, theirs):
    np.testing.assert_array_equal(updated(ours), updated(theirs))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("lien", {}, r"no transformation 'lien'; did you mean lion\?"),
        ("numerics", {}, "optax has no transformation 'numerics'"),
        ("sgd", {}, r"optax\.sgd needs learning_rate"),
        ("clip", {"delta": 1.0}, r"no argument 'delta'; did you mean max_delta\?"),
        ("clip", {"max_delta": "x"}, r"optax\.clip cannot be used with"),
        ("polyak_sgd", {}, r"optax\.polyak_sgd cannot be used with"),
        ("chain", {"args": 1}, r"optax\.chain cannot be used with"),
    ],
)
def test_names_and_arguments_that_do_not_fit_are_refused(name, arguments, message):
    with pytest.raises(InputError, match=message):
        optax_transformation(name, arguments)


def test_a_state_that_cannot_be_saved_is_refused():
    with pytest.raises(InputError, match="a key of random numbers, which is not saved"):
        optax_transformation("noisy_sgd", {"eta": 0.1, "key": 0}, 0.1)


def test_parts_that_are_no_transformations_are_refused():
    for parts in ([], [0.1]):
        with pytest.raises(InputError, match="expected transformations"):
            optax_chain(parts)
