"""The chunked form of the gated delta rule equals the recurrent one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.models.delta_rule import (
    DeltaInputs,
    chunked_delta,
    recurrent_delta,
)

R, H, K, V = 2, 2, 4, 3


def drawn(length, seed=0):
    keys = jax.random.split(jax.random.key(seed), 6)

    def normal(key, *shape):
        return jax.random.normal(key, (R, length, *shape))

    def unit(x):
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    inputs = DeltaInputs(
        unit(normal(keys[0], H, K)),
        unit(normal(keys[1], H, K)),
        normal(keys[2], H, V),
        -jax.nn.softplus(normal(keys[3], H)),
        jax.nn.sigmoid(normal(keys[4], H)),
    )
    return inputs, jax.random.normal(keys[5], (R, H, K, V))


def chunked(inputs, memory):
    return chunked_delta(inputs, memory[:, None])


@pytest.mark.parametrize("length", [1, 63, 64, 65, 300])
def test_outputs_states_and_gradients_are_those_of_the_recurrence(length):
    inputs, memory = drawn(length)
    (expected, pull), (actual, pull_chunks) = (
        jax.vjp(jax.jit(form), inputs, memory) for form in (recurrent_delta, chunked)
    )
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    seeds = jax.tree.map(
        lambda x: jax.random.normal(jax.random.key(1), x.shape), expected
    )
    for one, other in zip(
        *(jax.tree.leaves(each(seeds)) for each in (pull_chunks, pull)), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-5 * max(1, np.abs(other).max()))


@pytest.mark.parametrize("own", [False, True])
def test_packed_examples_begin_with_their_own_memory(own):
    inputs, _ = drawn(12)
    starts = jax.random.normal(jax.random.key(2), (R, 3 if own else 1, H, K, V))
    segments = jnp.array([[1] * 5 + [2] * 3 + [3] * 4, [1] * 4 + [2] * 6 + [0] * 2])
    output, memory = jax.jit(lambda *given: chunked_delta(*given, chunk=4))(
        inputs, starts, segments
    )
    for row, ends in enumerate([(5, 8, 12), (4, 10)]):
        for example, (first, stop) in enumerate(zip((0, *ends), ends, strict=False)):
            part = DeltaInputs(*(x[row : row + 1, first:stop] for x in inputs))
            start = starts[row : row + 1, example if own else 0]
            expected, last = recurrent_delta(part, start)
            np.testing.assert_allclose(output[row, first:stop], expected[0], atol=1e-5)
            if stop == 12:
                np.testing.assert_allclose(memory[row], last[0], atol=1e-5)


def test_a_position_without_strength_and_decay_leaves_the_memory():
    inputs, memory = drawn(3)
    still = inputs._replace(
        strength=jnp.zeros_like(inputs.strength), decay=jnp.zeros_like(inputs.decay)
    )
    np.testing.assert_allclose(chunked(still, memory)[1], memory, rtol=1e-6)
