"""Compares losses of all shapes and terms with optax and explicit formulas."""

# TRL and torch are in the `bench` extra only.
# pyright: reportMissingImports=false

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prompt_tuning.losses.cross_entropy import distillation_loss, token_loss
from prompt_tuning.losses.logit_losses import Divergence, LossTerms
from scripts.bench import hlo
from tests.support.chunks import chunked

# Only a few of each, since a program is compiled for every pair.
SHAPES = [((1,), 1, 2), ((2, 3), 4, 7), ((5,), 3, 33), ((3, 1, 2), 8, 5)]
TERMS = [
    LossTerms(),
    LossTerms(soft_cap=3.0),
    LossTerms(z_loss=0.02, soft_cap=1.5),
    LossTerms(z_loss=0.01, label_smoothing=0.2, soft_cap=5.0),
]


HIDDEN, BOTH = (0,), (0, 1)
"""Differentiated arguments with a frozen and with a trained head."""


@functools.partial(jax.jit, static_argnums=(4, 5))
def ours(hidden, head, targets, weights, terms, trained):
    def loss(hidden, head):
        extra = terms.z_loss, terms.label_smoothing, terms.soft_cap
        losses = token_loss(hidden, head, targets, *extra).nll
        return jnp.vdot(weights, losses), losses

    gradients, losses = jax.grad(loss, trained, has_aux=True)(hidden, head)
    return losses, gradients


def optax_losses(logits, targets, terms):
    """Losses of plain logits: T5X's smoothing, explicit cap and z-loss."""
    if terms.soft_cap is not None:
        logits = terms.soft_cap * jnp.tanh(logits / terms.soft_cap)
    size, s = logits.shape[-1], terms.label_smoothing
    wanted = jnp.full(logits.shape, s / (size - 1))
    wanted = jnp.where(jnp.arange(size) == targets[..., None], 1 - s, wanted)
    nats = optax.losses.softmax_cross_entropy(logits, wanted)
    if s:
        nats += (1 - s) * np.log(1 - s) + s * np.log(s / (size - 1))
    return nats + terms.z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2


@functools.partial(jax.jit, static_argnums=(4, 5))
def optax_gradients(hidden, head, targets, weights, terms, trained):
    """Computes the same as `ours` from plain arrays."""

    def loss(hidden, head):
        logits = jnp.einsum("...d,vd->...v", hidden, head, precision="highest")
        nats = optax_losses(logits, targets, terms)
        return jnp.vdot(weights, nats), nats

    gradients, losses = jax.grad(loss, trained, has_aux=True)(hidden, head)
    return losses, gradients


def drawn(shape, seed, spread):
    """Hidden states, a head, targets and weights, some of them negative."""
    lead, width, size = shape
    random = np.random.default_rng(seed)
    hidden, head, weights = (
        jnp.asarray(spread * random.standard_normal(shape), jnp.float32)
        for shape in ((*lead, width), (size, width), lead)
    )
    return hidden, head, jnp.asarray(random.integers(0, size, lead)), weights


ANY = {
    "shape": st.sampled_from(SHAPES),
    "terms": st.sampled_from(TERMS),
    "trained": st.sampled_from([HIDDEN, BOTH]),
    "seed": st.integers(0, 2**31 - 1),
    "spread": st.floats(0.1, 2.0),
}
FEW = settings(max_examples=24, deadline=None, derandomize=True, database=None)


@pytest.mark.exhaustive
@FEW
@given(**ANY)
def test_any_loss_and_gradient_equals_optaxs(shape, terms, trained, seed, spread):
    arguments = (*drawn(shape, seed, spread), terms, trained)
    (losses, slopes), (expected, wanted) = ours(*arguments), optax_gradients(*arguments)
    np.testing.assert_allclose(losses, expected, rtol=1e-6, atol=1e-6)
    for slope, other in zip(slopes, wanted, strict=True):
        np.testing.assert_allclose(slope, other, atol=1e-5)


@functools.partial(jax.jit, static_argnums=4)
def rounding(hidden, head, targets, weights, terms):
    """Returns the tolerance of each gradient: three roundings to bfloat16.

    They round the slope at each logit, a sum of slopes, and its product with a weight.
    """
    logits = jnp.einsum("...d,vd->...v", hidden, head, precision="highest")
    slope = jax.grad(lambda x: jnp.sum(optax_losses(x, targets, terms)))(logits)
    slope = jnp.abs(slope * weights[..., None])
    at_hidden = jnp.einsum("...v,vd->...d", slope, jnp.abs(head))
    at_head = jnp.einsum("...v,...d->vd", slope, jnp.abs(hidden))
    return 3 * 2**-8 * at_hidden, 3 * 2**-8 * at_head


@pytest.mark.exhaustive
@FEW
@given(**ANY)
def test_a_bfloat16_model_sums_in_float32(shape, terms, trained, seed, spread):
    """The loss is exact for the rounded inputs; only the gradients are rounded."""
    hidden, head, *rest = drawn(shape, seed, spread)
    half = hidden.astype(jnp.bfloat16)
    losses, slopes = ours(half, head, *rest, terms, trained)
    rounded = tuple(x.astype(jnp.bfloat16).astype(jnp.float32) for x in (hidden, head))
    expected, wanted = optax_gradients(*rounded, *rest, terms, trained)
    assert losses.dtype == jnp.float32
    np.testing.assert_allclose(losses, expected, rtol=1e-6, atol=1e-6)
    allowed = rounding(*rounded, *rest, terms)
    assert [slope.dtype for slope in slopes] == [jnp.bfloat16, jnp.float32][
        : len(slopes)
    ]
    for slope, other, most in zip(slopes, wanted, allowed, strict=False):
        assert np.all(np.abs(slope - other) <= most + 1e-6)


B, M, D, V = 2, 6, 8, 11
RANDOM = np.random.default_rng(3)
STUDENT, TEACHER, HEAD = (
    jnp.asarray(RANDOM.standard_normal(shape), jnp.float32)
    for shape in ((B, M, D), (B, M, D), (V, D))
)
TARGETS = jnp.asarray(RANDOM.integers(0, V, (B, M)))


def test_a_large_cap_changes_nothing():
    plain = jax.jit(token_loss)(STUDENT, HEAD, TARGETS)
    capped = token_loss(STUDENT, HEAD, TARGETS, soft_cap=1e6)
    np.testing.assert_allclose(capped.nll, plain.nll, rtol=1e-5)


def test_capped_scores_bound_the_loss():
    """Scores of -100 and 100, capped to -2 and 2: log(1 + e^4) for the lower."""
    hidden, head = jnp.ones((1, 1)), jnp.array([[-100.0], [100.0]])
    loss = jax.jit(lambda h, w: token_loss(h, w, jnp.array([0]), soft_cap=2.0))
    actual = loss(hidden, head)
    np.testing.assert_allclose(actual.nll, np.log1p(np.exp(4.0)), rtol=1e-6)
    assert not actual.correct.any()


def divergence_of_logits(kind: Divergence, student, teacher):
    """The definition of a divergence, of probabilities."""
    relative = optax.losses.kl_divergence_with_log_targets
    s, t = (jax.nn.log_softmax(logits) for logits in (student, teacher))
    if kind.kind == "forward":
        return relative(s, t)
    if kind.kind == "reverse":
        return relative(t, s)
    mixed = jnp.log((1 - kind.beta) * jnp.exp(s) + kind.beta * jnp.exp(t))
    return kind.beta * relative(mixed, t) + (1 - kind.beta) * relative(mixed, s)


DIVERGENCES = [
    Divergence("forward"),
    Divergence("reverse"),
    Divergence("jsd", 0.5),
    Divergence("jsd", 0.1),
]


@pytest.mark.parametrize(
    ("kind", "rows", "trained"),
    [
        (DIVERGENCES[0], None, 0),
        (DIVERGENCES[0], 5, (0, 1)),
        (DIVERGENCES[1], 5, (0, 1)),
        (DIVERGENCES[2], None, 0),
        (DIVERGENCES[3], 5, (0, 1)),
    ],
)
def test_a_divergence_from_a_teacher_equals_its_definition(
    monkeypatch, kind, rows, trained
):
    if rows is not None:
        chunked(monkeypatch, rows)
    weights = jnp.linspace(-1, 2, B * M).reshape(B, M)

    def student(hidden, head):
        losses = distillation_loss(hidden, head, TARGETS, TEACHER, kind).nll
        return jnp.vdot(weights, losses), losses

    def plain(hidden, head):
        # A teacher has no gradient, not even through a trained head.
        fixed = jax.lax.stop_gradient(TEACHER @ head.T)
        losses = divergence_of_logits(kind, hidden @ head.T, fixed)
        return jnp.vdot(weights, losses), losses

    actual, expected = (
        jax.jit(jax.grad(loss, trained, has_aux=True))(STUDENT, HEAD)
        for loss in (student, plain)
    )
    for mine, other in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("kind", "beta"), list(zip(DIVERGENCES, (0, 1, 0.5, 0.1), strict=True))
)
def test_a_divergence_and_its_gradient_are_trls(monkeypatch, kind, beta):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    import torch
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    def loss(hidden):
        return jnp.mean(distillation_loss(hidden, HEAD, TARGETS, TEACHER, kind).nll)

    value, gradient = jax.jit(jax.value_and_grad(loss))(STUDENT)
    hidden, teacher, head = (
        torch.tensor(np.asarray(x)) for x in (STUDENT, TEACHER, HEAD)
    )
    hidden.requires_grad_()
    expected = GKDTrainer.generalized_jsd_loss(
        hidden @ head.T,
        teacher @ head.T,
        labels=torch.tensor(np.asarray(TARGETS)),
        beta=beta,
    )
    expected.backward()
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, hidden.grad.numpy(), atol=1e-6)


@pytest.mark.parametrize("kind", DIVERGENCES[:3])
def test_a_student_equal_to_its_teacher_has_no_gradient(kind):
    def loss(hidden):
        return jnp.sum(distillation_loss(hidden, HEAD, TARGETS, TEACHER, kind).nll)

    value, gradient = jax.jit(jax.value_and_grad(loss))(TEACHER)
    np.testing.assert_allclose(value, 0, atol=1e-5)
    np.testing.assert_allclose(gradient, 0, atol=1e-6)


def test_no_array_has_the_teachers_logits_of_all_positions(monkeypatch):
    chunked(monkeypatch, 4)

    def loss(hidden, teacher):
        return jnp.sum(distillation_loss(hidden, HEAD, TARGETS, teacher).nll)

    compiled = jax.jit(jax.grad(loss)).lower(STUDENT, TEACHER).compile()
    sizes = {np.prod(shape) for shape in hlo.array_shapes(compiled)}
    assert 4 * V in sizes and B * M * V not in sizes
