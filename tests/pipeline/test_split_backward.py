"""The cut of a joint trace against `jax.vjp`, with postponed weight gradients."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.losses.token_objective import NATS_PER_WEIGHT
from prompt_tuning.pipeline.split_backward import SplitBackward
from prompt_tuning.pipeline.staged_model import StagedModel
from tests.support import dummies

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
    cut = SplitBackward(function, weights, hidden, others)
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

    cut = SplitBackward(frozen_blocks, {}, hidden, others)
    outputs, kept = cut.forward({}, hidden, others)
    _, handed = cut.input_gradient({}, others, kept, outputs)
    assert handed == []
    assert cut.held(kept, outputs) == []


@pytest.mark.parametrize("trained", [".*", ".*/prompt/.*"])
def test_no_product_of_a_stage_is_computed_twice(trained):
    config = dataclasses.replace(dummies.LLAMA, layers=2)
    graph, parameters = dummies.prompted(config)
    batch = dummies.make_batch(config, dummies.random_rows([(4, 3), (1, 5)]))
    staged = StagedModel(
        graph, NATS_PER_WEIGHT, parameters, (batch, None, None), (1, 1)
    )
    # The last stage: a block, the head and the loss, with keys and values of the
    # prompt from its own part of the prefix.
    part, others = staged.micro_batch[1], jax.tree.leaves(batch)
    own = {path: parameters[path][staged.rows_of(1, path)] for path in staged.paths(1)}
    weights = {p: x for p, x in own.items() if re.fullmatch(trained, p)}
    frozen = {p: x for p, x in own.items() if p not in weights}
    assert staged.prefix is not None
    carried, prefix = [np.zeros((2 * 7, config.width), np.float32)], {}
    for i in range(3):
        shape = staged.prefix[1].function.outputs[i].aval.shape
        prefix[i] = np.zeros((1, *shape[1:]), np.float32)
    inputs, known = {"carried": carried, "prefix": prefix}, (frozen, others)
    cut = SplitBackward(part, weights, inputs, known)
    outputs, kept = jax.eval_shape(cut.forward, weights, inputs, known)

    def count(function, *arguments):
        return _products(jax.make_jaxpr(function)(*arguments).jaxpr)

    def autodiff(weights, inputs, gradients):
        _, pull_back = jax.vjp(lambda w, x: part(w, x, known), weights, inputs)
        return pull_back(gradients)

    p1 = count(cut.input_gradient, weights, known, kept, outputs)
    _, handed = jax.eval_shape(cut.input_gradient, weights, known, kept, outputs)
    held = jax.eval_shape(cut.held, kept, outputs)
    p2 = count(cut.weight_gradient, weights, known, held, handed)
    forward = count(cut.forward, weights, inputs, known)
    assert forward + p1 + p2 == count(autodiff, weights, inputs, outputs)
    if trained == ".*":
        # Each weight has one product with its input: of all 14 tokens in the block, of
        # the 10 that are predicted in the head.
        kernels = {p: x.size for p, x in weights.items() if "kernel" in p}
        head = kernels.pop("head/kernel")
        assert p2 == 14 * sum(kernels.values()) + 10 * head
    else:
        assert (p2, held, handed) == (0, [], [])
