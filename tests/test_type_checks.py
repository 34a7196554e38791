"""Tests the check of types and array shapes at every call."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float, TypeCheckError

from tests.support.type_checks import check


def norms(x: Float[Array, "row width"], y: Float[Array, "row"]) -> Float[Array, "row"]:
    return jnp.linalg.norm(x, axis=-1) + y


def count(n: int) -> int:
    return n


@dataclasses.dataclass
class Pair:
    first: Float[Array, "n"]
    second: Float[Array, "n"]


def test_axes_of_one_name_have_one_size_in_a_call():
    checked = check(norms)
    assert checked(jnp.ones((2, 3)), jnp.ones(2)).shape == (2,)
    assert checked(jnp.ones((4, 3)), jnp.ones(4)).shape == (4,)
    with pytest.raises(TypeCheckError):
        checked(jnp.ones((2, 3)), jnp.ones(3))


def test_axes_are_checked_while_a_function_is_traced():
    with pytest.raises(TypeCheckError):
        jax.eval_shape(check(norms), jnp.ones((2, 3)), jnp.ones(3))


def test_plain_types_are_checked():
    with pytest.raises(TypeCheckError):
        check(count)("1")


def test_the_fields_of_a_dataclass_are_checked():
    checked = check(Pair)
    checked(jnp.ones(2), jnp.ones(2))
    with pytest.raises(TypeCheckError):
        checked(jnp.ones(2), jnp.ones(3))
