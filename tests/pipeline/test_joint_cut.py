"""The cut of a joint trace against `jax.vjp`, with postponed weight gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.pipeline.joint_cut import JointCut

WIDTH, INNER, CLASSES, ROWS, BLOCKS = 8, 16, 4, 5, 3


def blocks_and_head(weights, hidden, others, *, checkpointed):
    """Residual blocks in a loop, then a head; `others` scales the blocks' outputs."""

    def block(hidden, layer):
        inner = jnp.tanh(hidden @ layer["up"])
        return hidden + others * (inner @ layer["down"]), ()

    block = jax.checkpoint(block) if checkpointed else block
    hidden, _ = jax.lax.scan(block, hidden, weights["layers"])
    return jax.nn.gelu(hidden @ weights["head"])


def arguments():
    draw = np.random.default_rng(0).standard_normal
    layers = {"up": draw((BLOCKS, WIDTH, INNER)), "down": draw((BLOCKS, INNER, WIDTH))}
    weights = {"layers": layers, "head": draw((WIDTH, CLASSES))}
    values = weights, draw((ROWS, WIDTH)), np.float32(0.5)
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32) / 4, values)


def _products(program):
    count = 0
    for equation in program.eqns:
        times = equation.params.get("length", 1)
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                count += times * _products(inner)
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            size = np.prod([shape[i] for i in contracted])
            count += int(size * np.prod(equation.outvars[0].aval.shape))
    return count


@pytest.mark.parametrize("checkpointed", [False, True])
def test_postponed_weight_gradients_equal_autodiffs(checkpointed):
    weights, hidden, others = arguments()
    function = functools.partial(blocks_and_head, checkpointed=checkpointed)
    cut = JointCut(function, weights, hidden, others)
    outputs, kept = jax.jit(cut.forward)(weights, hidden, others)
    gradients = jnp.cos(jnp.arange(outputs.size, dtype=jnp.float32))
    gradients = gradients.reshape(outputs.shape)
    p1 = cut.input_gradient, weights, others, kept, gradients
    input_gradient, handed = jax.jit(p1[0])(*p1[1:])
    p2 = (
        cut.weight_gradient,
        weights,
        others,
        cut.held(kept, gradients),
        handed,
    )
    weight_gradient = jax.jit(p2[0])(*p2[1:])

    def autodiff(weights, hidden, gradients):
        _, pull_back = jax.vjp(lambda w, x: function(w, x, others), weights, hidden)
        return pull_back(gradients)

    expected = jax.jit(autodiff)(weights, hidden, gradients)
    np.testing.assert_allclose(input_gradient, expected[1], rtol=1e-5, atol=1e-6)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
        weight_gradient,
        expected[0],
    )
    # By hand, in products of a row: p1 has one for each weight matrix, and p2 too.
    once = ROWS * (BLOCKS * 2 * WIDTH * INNER + WIDTH * CLASSES)
    again = ROWS * BLOCKS * WIDTH * INNER * checkpointed  # only `up`: `down` is linear
    assert _products(jax.make_jaxpr(p2[0])(*p2[1:]).jaxpr) == once
    assert _products(jax.make_jaxpr(p1[0])(*p1[1:]).jaxpr) == once + again
    # No weight is among what is kept, so that no micro-batch has a copy of one.
    shapes = {x.shape for x in jax.tree.leaves(weights)}
    assert shapes.isdisjoint(x.shape for x in (*kept, *handed))


def test_nothing_is_left_for_p2_where_no_weight_is_trained():
    weights, hidden, others = arguments()

    def frozen_blocks(trained, hidden, others):
        return blocks_and_head(weights, hidden, others, checkpointed=False)

    cut = JointCut(frozen_blocks, {}, hidden, others)
    outputs, kept = cut.forward({}, hidden, others)
    _, handed = cut.input_gradient({}, others, kept, outputs)
    assert handed == []
    assert cut.held(kept, outputs) == []
