"""Attention in blocks of queries, against softmax written out in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.models import attention
from prompt_tuning.models.attention import AttentionSource, KeyValues, attend

G, R, H, Q, K = 2, 2, 3, 7, 4
SHARED, OWN = 5, 7
SCALE = 0.5


def random(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


QUERY = random(G, R, H, Q, K)
MASK = np.tri(Q, dtype=bool)[None, None]
BIAS = random(1, G * H, Q, OWN)
PARTS = (
    random(G, 1, SHARED, K),
    random(G, 1, SHARED, K) + 1,
    random(G, R, OWN, K),
    random(G, R, OWN, K) + 1,
)


def run(query, parts, key=None):
    """Attends to a shared source, and to a masked source with a bias."""
    query, *parts = map(jnp.asarray, (query, *parts))
    sources = (
        AttentionSource(KeyValues(*parts[:2]), None, None),
        AttentionSource(KeyValues(*parts[2:]), jnp.asarray(MASK), jnp.asarray(BIAS)),
    )
    return attend(query, sources, scale=SCALE, dropout_rate=0.5, key=key)


def expected(query, parts):
    """The same in NumPy, in float64."""
    query, *parts = (np.float64(x) for x in (query, *parts))
    repeated = [np.broadcast_to(x, (G, R, *x.shape[2:])) for x in parts]
    scores = [
        np.einsum("grhqk,grsk->grhqs", query, keys) * SCALE for keys in repeated[::2]
    ]
    bias = BIAS.reshape(G, 1, H, Q, OWN)
    scores[1] = np.where(MASK[0], scores[1] + bias, -np.inf)
    joined = np.concatenate(scores, -1)
    weights = np.exp(joined - joined.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    values = np.concatenate(repeated[1::2], 2)
    return np.einsum("grhqs,grsk->grhqk", weights, values)


@pytest.mark.parametrize("most", [3, 512])
def test_output(monkeypatch, most):
    monkeypatch.setattr(attention, "MAXIMUM_QUERIES", most)
    np.testing.assert_allclose(run(QUERY, PARTS), expected(QUERY, PARTS), atol=1e-5)


@pytest.mark.parametrize("key", [None, jax.random.key(0)], ids=["plain", "dropout"])
def test_blocks_change_no_gradient(monkeypatch, key):
    weights = random(*QUERY.shape)

    def gradients(most):
        monkeypatch.setattr(attention, "MAXIMUM_QUERIES", most)
        loss = jax.jit(
            jax.value_and_grad(
                lambda query, parts: (run(query, parts, key) * weights).sum(), (0, 1)
            )
        )
        return jax.tree.leaves(loss(QUERY, PARTS))

    for whole, by_blocks in zip(gradients(512), gradients(3), strict=True):
        np.testing.assert_allclose(by_blocks, whole, atol=2e-5)


def test_scores_of_long_rows_are_not_stored(monkeypatch):
    def scores_shapes(most):
        monkeypatch.setattr(attention, "MAXIMUM_QUERIES", most)
        loss = jax.grad(lambda query, parts: run(query, parts).sum(), (0, 1))
        return f"{Q},{SHARED}]" in str(jax.make_jaxpr(loss)(QUERY, PARTS))

    assert scores_shapes(512)
    assert not scores_shapes(3)


CAP = 0.8


def capped(query, parts):
    """Attends to a shared and to a masked source, with bounded scores."""
    sources = (
        AttentionSource(KeyValues(*parts[:2]), None, None),
        AttentionSource(KeyValues(*parts[2:]), jnp.asarray(MASK), jnp.asarray(BIAS)),
    )
    return attend(query, sources, scale=SCALE, soft_cap=CAP)


def capped_formula(query, parts):
    """The formula of Gemma 2, for automatic differentiation."""
    parts = [jnp.broadcast_to(x, (G, R, *x.shape[2:])) for x in parts]
    scores = [
        CAP * jnp.tanh(jnp.einsum("grhqk,grsk->grhqs", query, keys) * SCALE / CAP)
        for keys in parts[::2]
    ]
    own = scores[1] + BIAS.reshape(G, 1, H, Q, OWN)
    scores[1] = jnp.where(MASK[0], own, -jnp.inf)
    weights = jax.nn.softmax(jnp.concatenate(scores, -1))
    return jnp.einsum("grhqs,grsk->grhqk", weights, jnp.concatenate(parts[1::2], 2))


@pytest.mark.parametrize("most", [3, 512])
def test_soft_cap_and_its_gradients_are_those_of_the_formula(monkeypatch, most):
    monkeypatch.setattr(attention, "MAXIMUM_QUERIES", most)
    weights, parts = random(*QUERY.shape), tuple(map(jnp.asarray, PARTS))

    def results(function):
        loss = jax.value_and_grad(
            lambda query, parts: (function(query, parts) * weights).sum(), (0, 1)
        )
        return jax.tree.leaves(jax.jit(loss)(jnp.asarray(QUERY), parts))

    pairs = zip(results(capped), results(capped_formula), strict=True)
    for actual, correct in pairs:
        np.testing.assert_allclose(actual, correct, atol=3e-5)
