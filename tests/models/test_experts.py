"""Mixtures of experts, against a loop over tokens in NumPy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.core.quantization.product import StoredKernel
from prompt_tuning.models.expert_adapters import ExpertChanges, ExpertFactors
from prompt_tuning.models.expert_routing import route
from prompt_tuning.models.experts import (
    ExpertBiases,
    ExpertKernels,
    run_all,
    run_grouped,
)
from tests.support import dummies

N, D, F, E, K = 7, 4, 5, 6, 3
RANDOM = np.random.default_rng(0)


def random(*shape):
    return jnp.asarray(RANDOM.standard_normal(shape), jnp.float32)


X = random(N, D)
KERNELS = ExpertKernels(
    *(StoredKernel(random(E, *size)) for size in ((D, F), (D, F), (F, D)))
)
# No token chooses the last expert.
CHOSEN = jnp.asarray([RANDOM.permutation(E - 1)[:K] for _ in range(N)])
WEIGHTS = random(N, K)


def expected(x, chosen, weights, kernels):
    """The sum over the chosen experts of each token."""
    rows = []
    for row, experts, factors in zip(x, chosen, weights, strict=True):
        total = 0
        for expert, factor in zip(experts, factors, strict=True):
            gate, up, down = (each.kernel[int(expert)] for each in kernels)
            total = total + factor * ((jax.nn.silu(row @ gate) * (row @ up)) @ down)
        rows.append(total)
    return jnp.stack(rows)


def adapted(x, chosen, weights, kernels, changes):
    """The same with the low-rank products in the kernels."""
    kernels = kernels._replace(
        up=StoredKernel(kernels.up.kernel + changes.up.a @ changes.up.b),
        down=StoredKernel(kernels.down.kernel + changes.down.a @ changes.down.b),
    )
    return expected(x, chosen, weights, kernels)


@pytest.mark.slow
@pytest.mark.parametrize("run", [run_all, run_grouped])
def test_outputs_and_gradients_are_those_of_the_chosen_experts(run):
    cotangent = random(N, D)
    changes = ExpertChanges(
        up=ExpertFactors(random(E, D, 2), random(E, 2, F)),
        down=ExpertFactors(random(E, F, 3), random(E, 3, D)),
    )

    def results(function):
        loss = jax.value_and_grad(
            lambda x, weights, kernels, changes: (
                function(x, CHOSEN, weights, kernels, changes=changes) * cotangent
            ).sum(),
            (0, 1, 2, 3),
        )
        return jax.tree.leaves(loss(X, WEIGHTS, KERNELS, changes))

    ours = results(jax.jit(functools.partial(run, activation="silu")))
    for actual, correct in zip(ours, results(adapted), strict=True):
        np.testing.assert_allclose(actual, correct, rtol=1e-4, atol=3e-4)


@pytest.mark.slow
@pytest.mark.parametrize("run", [run_all, run_grouped])
def test_each_position_has_the_factors_of_its_entry(run):
    entries = jnp.arange(N) % 2
    sizes = ((D, 2), (2, F)), ((F, 3), (3, D))
    up, down = (ExpertFactors(*(random(E, 2, *x) for x in pair)) for pair in sizes)
    own = [
        adapted(
            X,
            CHOSEN,
            WEIGHTS,
            KERNELS,
            ExpertChanges(
                up=ExpertFactors(*(x[:, entry] for x in up)),
                down=ExpertFactors(*(x[:, entry] for x in down)),
            ),
        )
        for entry in range(2)
    ]
    changes = ExpertChanges(up=up, down=down)
    actual = run(
        *(X, CHOSEN, WEIGHTS, KERNELS, "silu"), changes=changes, entries=entries
    )
    correct = jnp.where(entries[:, None] == 0, *own)
    np.testing.assert_allclose(actual, correct, rtol=1e-4, atol=3e-4)


@pytest.mark.slow
@pytest.mark.parametrize("run", [run_all, run_grouped])
def test_biased_experts_clamp_gates_above_and_projections_on_both_sides(run):
    """The formula of transformers' `GptOssExperts`."""
    biases, limit = ExpertBiases(random(E, F), random(E, F)), 0.5
    rows = []
    for x, experts, factors in zip(X, CHOSEN, WEIGHTS, strict=True):
        total = 0
        for e, factor in zip(experts, factors, strict=True):
            gate_kernel, up_kernel, down_kernel = (x.kernel[e] for x in KERNELS if x)
            gate = jnp.minimum(x @ gate_kernel + biases.gate[e], limit)
            up = jnp.clip(x @ up_kernel + biases.up[e], -limit, limit)
            inner = gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)
            total = total + factor * (inner @ down_kernel)
        rows.append(total)
    actual = run(X, CHOSEN, WEIGHTS, KERNELS, "quick_gelu", biases, limit)
    np.testing.assert_allclose(actual, jnp.stack(rows), atol=2e-5)


@pytest.mark.parametrize("normalize", [True, False])
def test_the_best_experts_get_their_share_of_the_softmax(normalize):
    config = dataclasses.replace(
        dummies.LLAMA, experts=3, experts_per_token=2, normalize_experts=normalize
    )
    scores = jnp.log(jnp.array([[0.2, 0.5, 0.3]]))
    chosen, weights = route(scores, config)
    np.testing.assert_array_equal(chosen, [[1, 2]])
    total = 0.8 if normalize else 1
    np.testing.assert_allclose(weights, [[0.5 / total, 0.3 / total]], rtol=1e-6)
