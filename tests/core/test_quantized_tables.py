"""Embedding tables and heads in few bits, and models that have them."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.core import parameter_groups
from prompt_tuning.core.parameters import store_kernel
from prompt_tuning.core.quantization.product import as_float32
from prompt_tuning.core.quantization.stores import INT8, STORES, TABLES, Store
from prompt_tuning.core.quantization.tables import QuantizedTable, wide_table
from prompt_tuning.losses import output_head
from prompt_tuning.losses.output_head import (
    OutputHead,
    head_logits,
    hidden_gradient,
)
from prompt_tuning.training.gradients import gradients
from tests.support import dummies
from tests.support.exhaustive import sample

ROWS, WIDTH, GROUP = 300, 64, 32


def drawn_table(name: str) -> tuple[QuantizedTable, np.ndarray]:
    """Returns a table in a store, and the weights of the same kernel."""
    weights = jax.random.normal(jax.random.key(0), (ROWS, WIDTH))
    store = Store(name, None if name == INT8 else GROUP, zeros=name == "int4")
    kernel = store_kernel(weights.T, ("embed", "vocab"), store)
    codes, *others = kernel.transposed().stored[:-1]
    return QuantizedTable(codes, *others), np.asarray(as_float32(*kernel.stored)).T


@pytest.mark.parametrize("name", STORES)
def test_rows_are_those_of_the_transposed_kernel(name):
    table, meant = drawn_table(name)
    assert (len(table), table.shape) == (ROWS, (ROWS, WIDTH))
    np.testing.assert_array_equal(table.widened(), meant)
    ids = jnp.array([[3, 299], [0, 3]])
    np.testing.assert_array_equal(table[ids], meant[np.asarray(ids)])
    np.testing.assert_array_equal(table.part(7, 40), meant[7:47])


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("count", [1, 5, 200])
def test_logits_and_gradients_are_those_of_the_wide_head(name, count, monkeypatch):
    monkeypatch.setattr(output_head, "LARGEST_WIDENED", 70 * WIDTH)
    table, meant = drawn_table(name)
    hidden = jax.random.normal(jax.random.key(1), (count, WIDTH))

    def squares(hidden, table):
        return (head_logits(hidden, OutputHead(table)) ** 2).sum()

    compiled = jax.jit(jax.grad(squares)).lower(hidden, table).compile()
    logits = hidden @ meant.T
    np.testing.assert_allclose(
        head_logits(hidden, OutputHead(table)), logits, atol=1e-4
    )
    expected = 2 * logits @ meant
    np.testing.assert_allclose(compiled(hidden, table), expected, rtol=1e-4, atol=0.05)
    np.testing.assert_allclose(
        hidden_gradient(2 * logits, table), expected, rtol=1e-4, atol=0.05
    )
    text = compiled.as_text()
    assert text is not None
    assert re.findall(rf"f32\[(?:{ROWS},{WIDTH}|{WIDTH},{ROWS})\]", text) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name"),
    sample(
        4,
        [
            *zip(dummies.FAMILIES, ["nf4", INT8] * 2, strict=True),
            *zip(dummies.FAMILIES, [INT8, "nf4"] * 2, strict=True),
        ],
    ),
)
def test_models_compute_with_the_rows_that_their_tables_stand_for(family, name):
    config = dataclasses.replace(
        dummies.FAMILIES[family], parameter_dtype=name, quantized_tables=True
    )
    graph, held = dummies.prompted(config)
    tables = [path for path in TABLES if path in held]
    assert all(held[path].dtype in ("uint8", "int8") for path in tables)
    wide = dataclasses.replace(config, quantized_tables=False)
    plain, meant = dummies.prompted(wide)
    meant = {p: held[p] for p in meant} | {p: wide_table(held, p) for p in tables}
    batch = dummies.make_batch(config, dummies.random_rows([(4, 3), (2, 5)]))
    found = loss_and_gradient(graph, held, batch)
    expected = loss_and_gradient(plain, meant, batch)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5),
        found,
        expected,
    )


def loss_and_gradient(graph, parameters, batch):
    """Returns the mean loss of a batch, and the gradient of the prompts."""
    group = parameter_groups.ParameterGroup([".*/prompt/.*"], parameter_groups.adamw())
    trained, frozen = parameter_groups.partition(
        parameters, parameter_groups.label(parameters, [group])
    )
    run = jax.jit(functools.partial(gradients, graph, key=None))
    gradient, sums = run(trained, frozen, batch)
    return sums.loss / sums.weight, gradient
