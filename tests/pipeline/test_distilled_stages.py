"""Context distillation in stages: teacher and student pass through the same blocks."""

import functools

import jax
import numpy as np
import pytest

from prompt_tuning.losses.context_distillation import Distillation
from prompt_tuning.pipeline.driver import PipelinedGradients
from prompt_tuning.pipeline.schedules import stage_orders
from prompt_tuning.pipeline.stage_devices import StageDevices
from prompt_tuning.training.distillation import make_teacher
from prompt_tuning.training.gradients import gradients
from tests.support import dummies

# Rows of different length and loss weight.
SIZES = [(4, 3), (1, 5), (6, 1), (3, 3)]
CONTEXT = [3, 1, 4]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "placement", "layers"),
    [
        ("llama", "prefix", (1, 1)),
        ("llama", "after_bos", (1, 1)),
        ("t5_gated", "prefix", (2, 2)),
    ],
)
def test_gradients_of_a_distillation_equal_those_of_one_device(
    family, placement, layers
):
    config = dummies.FAMILIES[family]
    graph, parameters = dummies.prompted(config)
    trained = {path: x for path, x in parameters.items() if "/prompt/" in path}
    frozen = {path: x for path, x in parameters.items() if path not in trained}
    objective = Distillation(make_teacher(config, CONTEXT, placement))
    batch = dummies.make_batch(config, dummies.random_rows(SIZES))
    batch = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)
    usual = jax.jit(functools.partial(gradients, graph, objective=objective))
    expected, expected_sums = usual(trained, frozen, batch, None)

    def orders(count, prefix):
        return stage_orders("1f1b", len(layers), count, False, prefix=prefix)

    stages = [StageDevices(device) for device in jax.devices()[: len(layers)]]
    pipeline = PipelinedGradients(graph, stages, layers, orders, objective)
    actual, sums = pipeline(trained, frozen, batch, None)
    np.testing.assert_allclose(sums.loss, expected_sums.loss, rtol=2e-7)
    assert trained
    for path, gradient in expected.items():
        largest = np.abs(gradient).max()
        assert largest > 1e-4
        np.testing.assert_allclose(
            actual[path], gradient, rtol=0, atol=1e-6 * largest, err_msg=path
        )
