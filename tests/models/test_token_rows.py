"""A model with rows of tokens is the model whose tables have them."""

import dataclasses
import re
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.core.parameters import merge
from prompt_tuning.losses.cross_entropy import token_loss
from prompt_tuning.models.build import build_model
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.prompts.token_rows import TokenRows
from tests.support.dummies import LLAMA, V, make_batch, with_numbers

IDS, HEAD_IDS = (3, V, V + 1), (V, V + 1, 5)
TABLE, KERNEL = "token_embedder/embedding", "head/kernel"
ROWS, HEAD = (f"token_embedder/adapters/tokens/{x}" for x in ("rows", "head"))


def both(tied):
    """Returns a model with rows of tokens, and the same with larger tables."""
    config = dataclasses.replace(
        LLAMA,
        tied_head=tied,
        vocabulary_size=V + 2,
        embedding_multiplier=3.0,
        logit_soft_cap=5.0,
    )
    width = config.width
    head = None if tied else jnp.zeros((3, width))
    tokens = TokenRows(jnp.zeros((3, width)), IDS, head, () if tied else HEAD_IDS)
    own = dataclasses.replace(config, new_tokens=2)
    graph, parameters = with_numbers(lambda key: build_model(key, own, tokens=tokens))
    whole, larger = with_numbers(lambda key: build_model(key, config))
    larger = dict(larger | {p: x for p, x in parameters.items() if p in larger})
    for path, rows, ids in ((TABLE, ROWS, IDS), (KERNEL, HEAD, HEAD_IDS)):
        if rows in parameters:
            table = jnp.pad(parameters[path], ((0, 2), (0, 0)))
            larger[path] = table.at[jnp.array(ids)].set(parameters[rows])
    return (graph, parameters), (whole, larger)


def loss(graph, parameters, batch):
    model = cast(LanguageModel, merge(graph, parameters))
    hidden = model.hidden(batch)
    losses = token_loss(
        hidden, model.output_head(), jnp.asarray(batch.targets)[:, 1:4], 0.1, 0.1
    )
    return losses.nll.mean(), model.logits(hidden)


def batch():
    rows = [([3, V, 9, 10], [V + 1, 5, V]), ([7, 3], [V, 8, 3])]
    return jax.tree.map(jnp.asarray, make_batch(LLAMA, rows))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_rows_have_the_logits_and_gradients_of_larger_tables(tied):
    (graph, parameters), (whole, larger) = both(tied)
    gradients = {}
    for name, structure, given in (("rows", graph, parameters), ("", whole, larger)):
        step = jax.jit(jax.value_and_grad(loss, 1, has_aux=True), static_argnums=0)
        gradients[name] = step(structure, given, batch())
    (ours, logits), d_rows = gradients["rows"]
    (expected, whole_logits), d_tables = gradients[""]
    np.testing.assert_allclose(logits, whole_logits, atol=1e-5)
    np.testing.assert_allclose(ours, expected, rtol=1e-6)
    for path, table, ids in ((ROWS, TABLE, IDS), (HEAD, KERNEL, HEAD_IDS)):
        if path in d_rows:
            wanted = np.asarray(d_tables[table])[list(ids)]
            np.testing.assert_allclose(d_rows[path], wanted, atol=1e-6)
            # Frozen rows of trained tokens have no effect.
            replaced = [id for id in ids if id < V]
            assert not np.asarray(d_rows[table])[replaced].any()
    for path in d_tables.keys() - {TABLE, KERNEL}:
        np.testing.assert_allclose(d_rows[path], d_tables[path], atol=1e-5)


def test_a_step_makes_no_copy_of_the_table():
    size = 5000  # rows of a table that no other array is as large as
    config = dataclasses.replace(LLAMA, vocabulary_size=size + 2, new_tokens=2)
    config = dataclasses.replace(config, tied_head=True)
    tokens = TokenRows(jnp.zeros((3, config.width)), (3, size, size + 1))
    graph, frozen = with_numbers(lambda key: build_model(key, config, tokens=tokens))
    rows = frozen.pop(ROWS)

    def of_rows(rows, frozen):
        return loss(graph, frozen | {ROWS: rows}, batch())[0]

    program = jax.jit(jax.grad(of_rows)).lower(rows, frozen).compile()
    text = str(program.as_text())
    made = re.findall(rf"= f32\[{size},{config.width}\]\S* (\w+)\(", text)
    assert set(made) == {"parameter"}
