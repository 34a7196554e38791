"""Counted operations against the products of JAX's own program of the model."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from prompt_tuning.core.parameters import logical_axes, merge
from prompt_tuning.models.scoring import loss_sums
from prompt_tuning.pipeline.operation_counts import MicroBatchShape, count_work
from prompt_tuning.pipeline.simulation import OperationCosts
from prompt_tuning.training.gradients import gradients
from tests.support import dummies

ROWS = [([3] * 20, [4] * 12)] * 4


def products(program) -> int:
    """Returns the operations of a program's matrix products, loops multiplied."""
    total = 0
    for equation in program.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            size = math.prod(left[i] for i in contracted)
            total += 2 * size * math.prod(equation.outvars[0].aval.shape)
        scans = equation.primitive.name == "scan"
        inner = sum(map(products, jaxprs_in_params(equation.params)))
        total += inner * (equation.params["length"] if scans else 1)
    return total


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5_gated"])
def test_counts_are_the_products_of_the_traced_program(family):
    small = dummies.FAMILIES[family]
    config = dataclasses.replace(small, width=64, vocabulary_size=301)
    graph, parameters = dummies.unprompted(config)
    batch = jax.tree.map(jnp.asarray, dummies.make_batch(config, ROWS))
    shape = MicroBatchShape(
        rows=len(ROWS),
        inputs=batch.tokens.shape[1],
        targets=batch.targets.shape[1],
        positions=batch.loss_positions.shape[1],
    )

    def counted(trained):
        axes = logical_axes(merge(graph, parameters))
        work = count_work(config, axes, parameters, trained, shape)
        return sum(work.blocks, OperationCosts())

    whole = jax.make_jaxpr(lambda p: gradients(graph, p, {}, batch, None))(parameters)
    assert counted(set(parameters)).total == pytest.approx(
        products(whole.jaxpr), rel=0.005
    )
    forward = jax.make_jaxpr(lambda p: loss_sums(graph, p, batch, None))(parameters)
    # The gradient of the head's input belongs to the forward pass of training.
    head = 2 * len(ROWS) * shape.positions * 64 * 301
    # T5's position bias is a product too, which is not counted.
    assert counted(()).forward == pytest.approx(
        products(forward.jaxpr) + head, rel=0.005
    )
    assert counted(()).weight_gradient == 0


def test_a_token_is_processed_by_some_experts_only():
    dense = dataclasses.replace(dummies.LLAMA, layers=1)
    experts = dataclasses.replace(dense, experts=4, experts_per_token=2)
    shape = MicroBatchShape(rows=1, inputs=1, targets=1, positions=0)

    def forward(config):
        graph, parameters = dummies.unprompted(config)
        axes = logical_axes(merge(graph, parameters))
        return count_work(config, axes, parameters, (), shape).decoder[0].forward

    # Two of four feed-forward layers of three matrices instead of one, and a router.
    matrices, router = 3 * 16 * 24, 16 * 4
    assert forward(experts) - forward(dense) == 2 * (matrices + router)


def test_running_a_block_again_is_part_of_p1():
    config = dummies.LLAMA
    again = dataclasses.replace(config.rematerialization, policy="nothing")
    graph, parameters = dummies.unprompted(config)
    axes = logical_axes(merge(graph, parameters))
    shape = MicroBatchShape(rows=2, inputs=9, targets=9, positions=3)
    saved, computed = (
        count_work(
            dataclasses.replace(config, rematerialization=policy),
            axes,
            parameters,
            (),
            shape,
        ).decoder[0]
        for policy in (config.rematerialization, again)
    )
    assert computed.input_gradient == saved.input_gradient + saved.forward
    assert jnp.isclose(computed.forward, saved.forward)
