"""The chunked form of each rule of a memory equals the recurrent one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.core.recomputation import ALL_BUT_WEIGHTS, checkpointed
from prompt_tuning.models.gated_delta import (
    DeltaInputs,
    chunked_delta,
    recurrent_delta,
)
from prompt_tuning.models.mamba import (
    ScanInputs,
    chunked_scan,
    recurrent_scan,
)
from prompt_tuning.models.memory_chunks import ChunkExamples
from prompt_tuning.models.state_space import (
    StateInputs,
    chunked_states,
    recurrent_states,
)
from tests.support.exhaustive import sample

R, H, G, K, V = 2, 4, 2, 4, 3
RATES = -jnp.exp(jnp.linspace(-3, 3, H * K).reshape(H, K))


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def delta(length):
    def unit(x):
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    return DeltaInputs(
        unit(normal(0, R, length, H, K)),
        unit(normal(1, R, length, H, K)),
        normal(2, R, length, H, V),
        -jax.nn.softplus(normal(3, R, length, H)),
        jax.nn.sigmoid(normal(4, R, length, H)),
    )


def states(length):
    # Two groups of heads share queries and keys; the last head forgets almost at once.
    step = jax.nn.softplus(normal(3, R, length, H))
    return StateInputs(
        normal(0, R, length, G, K),
        normal(1, R, length, G, K),
        normal(2, R, length, H, V),
        -step * jnp.array([0.1, 1.0, 4.0, 16.0]),
        step,
    )


def scan(length):
    return ScanInputs(
        normal(0, R, length, K),
        normal(1, R, length, K),
        normal(2, R, length, H, 1),
        jax.nn.softplus(normal(3, R, length, H)),
    )


RULES = {
    "delta": (delta, recurrent_delta, chunked_delta),
    "states": (states, recurrent_states, chunked_states),
    "scan": (
        scan,
        functools.partial(recurrent_scan, rates=RATES),
        functools.partial(chunked_scan, rates=RATES),
    ),
}
MEMORY = normal(5, R, H, K, V)


def memory_of(rule):
    return MEMORY[..., :1] if rule == "scan" else MEMORY


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "length"),
    sample(9, [(rule, n) for n in (1, 64, 300, 65, 63) for rule in RULES]),
)
def test_outputs_memories_and_gradients_are_those_of_the_recurrence(rule, length):
    drawn, recurrent, chunked = RULES[rule]
    forms = (recurrent, lambda inputs, memory: chunked(inputs, memory[:, None], None))

    def with_gradients(form, *arguments):
        outputs, pull = jax.vjp(form, *arguments)
        return outputs, pull(jax.tree.map(lambda x: normal(1, *x.shape), outputs))

    expected, actual = (
        jax.jit(functools.partial(with_gradients, form))(drawn(length), memory_of(rule))
        for form in forms
    )
    for one, other in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * max(1, np.abs(other).max()))


@pytest.mark.parametrize(
    ("rule", "own"),
    [("delta", 0), ("delta", 1), ("states", 1), ("scan", 0), ("scan", 1)],
)
def test_packed_examples_begin_with_their_own_memory(rule, own):
    drawn, recurrent, chunked = RULES[rule]
    width = memory_of(rule).shape[-1]
    inputs, starts = drawn(12), normal(2, R, 3 if own else 1, H, K, width)
    segments = jnp.array([[1] * 5 + [2] * 3 + [3] * 4, [1] * 4 + [2] * 6 + [0] * 2])
    output, memory = jax.jit(functools.partial(chunked, chunk=4))(
        inputs, starts, segments
    )
    for row, ends in enumerate([(5, 8, 12), (4, 10)]):
        for example, (first, stop) in enumerate(zip((0, *ends), ends, strict=False)):
            part = type(inputs)(*(x[row : row + 1, first:stop] for x in inputs))
            start = starts[row : row + 1, example if own else 0]
            expected, last = recurrent(part, start)
            np.testing.assert_allclose(output[row, first:stop], expected[0], atol=2e-5)
            if stop == 12:
                np.testing.assert_allclose(memory[row], last[0], atol=1e-5)


@pytest.mark.parametrize("rule", ["states", "scan"])
def test_gradients_of_packed_examples_are_those_of_each_alone(rule):
    drawn, recurrent, chunked = RULES[rule]
    starts = normal(2, R, 2, H, K, memory_of(rule).shape[-1])
    segments = jnp.array([[1] * 5 + [2] * 7] * R)

    def packed(arguments):
        inputs, starts, rates = arguments
        extra = {"rates": rates} if rule == "scan" else {}
        output, memory = chunked(inputs, starts, segments, chunk=4, **extra)
        return (output**2).sum() + (memory**2).sum()

    def alone(arguments):
        inputs, starts, rates = arguments
        extra = {"rates": rates} if rule == "scan" else {}
        total = 0
        for example, (first, stop) in enumerate([(0, 5), (5, 12)]):
            part = jax.tree.map(lambda x, a=first, b=stop: x[:, a:b], inputs)
            output, memory = recurrent(part, starts[:, example], **extra)
            total += (output**2).sum()
        return total + (memory**2).sum()

    arguments = drawn(12), starts, RATES
    gradients = (jax.jit(jax.grad(form))(arguments) for form in (packed, alone))
    for one, other in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * max(1, np.abs(other).max()))


def test_a_small_decay_after_large_ones_keeps_its_digits():
    decay = np.full((R, 64, H), -90.0, np.float32)
    decay[:, 32:] = -0.001 * np.arange(1, 33)[:, None]
    left = np.exp(np.cumsum(decay[:, 33:].astype(np.float64), axis=1))
    chunks = ChunkExamples.create(MEMORY[:, None], None, 64)
    _, actual = chunks.decays(jnp.asarray(decay).swapaxes(1, 2))
    np.testing.assert_allclose(actual[:, :, 33:, 32], left.swapaxes(1, 2), rtol=3e-7)


def test_the_backward_pass_keeps_nothing_for_pairs_of_positions():
    def run(inputs, memory):
        return chunked_delta(inputs, memory[:, None], chunk=16)

    _, pull = jax.vjp(
        checkpointed(run, ALL_BUT_WEIGHTS, in_scan=True), delta(48), MEMORY
    )
    shapes = {x.shape for x in jax.tree.leaves(pull)}
    assert not any(shape[-2:] == (16, 16) for shape in shapes)
    # The memory before each of the three chunks is kept, so that no chunk runs twice.
    assert (3, *MEMORY.shape) in shapes


@pytest.mark.parametrize("rule", RULES)
def test_a_position_that_gives_nothing_leaves_the_memory(rule):
    drawn, _, chunked = RULES[rule]
    names = {"decay", "strength", "step"} & {*drawn(3)._fields}
    still = drawn(3)._replace(**{x: jnp.zeros((R, 3, H)) for x in names})
    kept = chunked(still, memory_of(rule)[:, None], None)[1]
    np.testing.assert_allclose(kept, memory_of(rule), rtol=1e-6)


def test_the_delta_rule_waits_for_no_threads_within_a_program():
    # LAPACK's calls divide their matrices among the threads that run the program. Two
    # at once on two threads wait for each other, and the step never ends.
    def loss(inputs, memory):
        return chunked_delta(inputs, memory[:, None])[0].sum()

    lowered = jax.jit(jax.grad(loss)).lower(delta(64), MEMORY)
    assert "lapack" not in lowered.as_text()
