from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.core.array_matchers import CloseArrays, EqualArrays

TREE = {"a": np.arange(3.0), "b": (np.ones((2, 2)), 4)}


def test_a_call_with_equal_arrays_is_the_expected_one():
    function = mock.Mock()
    function({"a": jnp.arange(3.0), "b": (jnp.ones((2, 2)), 4)}, training=True)
    function.assert_called_once_with(EqualArrays(TREE), training=True)
    with pytest.raises(AssertionError):
        function.assert_called_once_with(EqualArrays(TREE | {"a": 0}), training=True)


@pytest.mark.parametrize("kind", [np.array, jnp.array])
def test_an_array_alone_is_compared_as_a_whole(kind):
    function = mock.Mock()
    function(kind([1.0, 2.0]))
    function.assert_called_once_with(EqualArrays(np.array([1.0, 2.0])))
    with pytest.raises(AssertionError):
        function.assert_called_once_with(EqualArrays(np.array([1.0, 3.0])))


@pytest.mark.parametrize(
    "other",
    [
        {"a": np.arange(3.0)},
        TREE | {"a": np.arange(4.0)},
        TREE | {"a": np.arange(3.0)[None]},
        TREE | {"a": np.arange(3.0) + 1e-3},
        TREE | {"b": [np.ones((2, 2)), 4]},
    ],
)
def test_other_values_shapes_and_structures_differ(other):
    assert EqualArrays(TREE) != other
    assert CloseArrays(TREE) != other


def test_close_values_are_equal_within_the_tolerance():
    near = TREE | {"a": np.arange(3.0) + 1e-6}
    assert EqualArrays(TREE) != near
    assert CloseArrays(TREE, atol=1e-5) == near
    assert CloseArrays(TREE, rtol=0.0, atol=1e-7) != near
