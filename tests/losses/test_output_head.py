"""A head with a bias and a soft cap, against the formula differentiated by JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.losses import output_head
from prompt_tuning.losses.cross_entropy import distillation_loss, token_loss
from prompt_tuning.losses.output_head import OutputHead, head_logits
from scripts.bench import hlo

M, D, V, CAP = 5, 3, 7, 1.5
RANDOM = np.random.default_rng(0)
HIDDEN, TEACHER, KERNEL, BIAS, WEIGHTS = (
    jnp.asarray(RANDOM.standard_normal(shape), jnp.float32)
    for shape in ((M, D), (M, D), (V, D), (V,), (M,))
)
TARGETS = jnp.asarray(RANDOM.integers(V, size=M))


def formula(hidden, kernel, bias):
    return CAP * jnp.tanh((hidden @ kernel.T + bias) / CAP)


def head(kernel, bias):
    return OutputHead(kernel, bias, CAP)


@pytest.mark.parametrize("trained", [(0,), (2,), (0, 1, 2)], ids=str)
def test_loss_and_gradients(trained):
    def ours(*arrays):
        return WEIGHTS @ token_loss(arrays[0], head(*arrays[1:]), TARGETS).nll

    def correct(*arrays):
        nll = optax.softmax_cross_entropy_with_integer_labels(formula(*arrays), TARGETS)
        return WEIGHTS @ nll

    arrays = (HIDDEN, KERNEL, BIAS)
    pairs = zip(
        *(
            jax.tree.leaves(jax.jit(jax.value_and_grad(loss, trained))(*arrays))
            for loss in (ours, correct)
        ),
        strict=True,
    )
    for actual, expected in pairs:
        np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_divergence_is_that_of_the_capped_logits():
    def correct(hidden):
        teacher, student = (
            jax.nn.log_softmax(formula(states, KERNEL, BIAS))
            for states in (TEACHER, hidden)
        )
        return (jnp.exp(teacher) * (teacher - student)).sum(-1) @ WEIGHTS

    def ours(hidden):
        losses = distillation_loss(hidden, head(KERNEL, BIAS), TARGETS, TEACHER)
        return losses.nll @ WEIGHTS

    for actual, expected in zip(
        *(jax.jit(jax.value_and_grad(f))(HIDDEN) for f in (ours, correct)), strict=True
    ):
        np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_a_second_cap_is_refused():
    with pytest.raises(InputError, match="the model caps its logits at"):
        token_loss(HIDDEN, head(KERNEL, BIAS), TARGETS, soft_cap=2.0)


@pytest.mark.parametrize("rows", [1, 2, 64, 65])
def test_logits_of_few_rows_in_parts_of_a_large_vocabulary(rows):
    hidden, kernel, bias = (
        jnp.asarray(RANDOM.standard_normal(shape), jnp.float32)
        for shape in ((rows, 1, 16), (3 * 257, 16), (3 * 257,))
    )

    @jax.jit
    def logits(hidden, kernel, bias):
        return head_logits(hidden, head(kernel, bias))

    actual = logits(hidden, kernel, bias)
    np.testing.assert_allclose(actual, formula(hidden, kernel, bias), atol=1e-5)
    [product] = hlo.products(logits.lower(hidden, kernel, bias).compile())
    assert ((3, 257, 16) in product.shapes) == (rows in (2, 64))


def test_a_softmax_of_logits_in_parts_is_right_in_one_program():
    # 29 parts of the vocabulary of GPT-2.
    random = np.random.default_rng(0)
    kernel = random.normal(size=(50_257, 8)).astype(np.float32)
    hidden = random.normal(size=(16, 8)).astype(np.float32)

    def run(hidden, kernel):
        return jax.nn.log_softmax(head_logits(hidden, OutputHead(kernel)))

    logits = (hidden @ kernel.T).astype(float)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    found = jax.jit(run)(jnp.array(hidden), jnp.array(kernel))
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_head_of_16_bits_is_widened_in_parts(monkeypatch):
    random = np.random.default_rng(0)
    hidden = jnp.asarray(random.normal(size=(70, 80)), jnp.bfloat16)
    kernel = jnp.asarray(random.normal(size=(96, 80)), jnp.bfloat16)
    targets = jnp.asarray(random.integers(0, 96, 70))

    def loss(hidden, kernel):
        return token_loss(hidden, kernel, targets).nll.sum()

    whole = jax.jit(jax.value_and_grad(loss))(hidden, kernel)
    monkeypatch.setattr(output_head, "LARGEST_WIDENED", 28 * 80)
    parts = jax.jit(jax.value_and_grad(lambda *x: loss(*x)))(hidden, kernel)
    np.testing.assert_allclose(parts[0], whole[0], rtol=1e-5)
    np.testing.assert_allclose(
        parts[1].astype(np.float32), whole[1].astype(np.float32), atol=0.02
    )
    traced = jax.make_jaxpr(jax.grad(lambda *x: loss(*x)))(hidden, kernel)
    assert "length=3" in str(traced)  # three parts of 28 tokens, and 12 more
    # More rows than the width have logits that are larger than the wide head.
    targets = jnp.zeros(140, int)
    doubled = jnp.concatenate([hidden, hidden])
    traced = jax.make_jaxpr(jax.grad(lambda *x: loss(*x)))(doubled, kernel)
    assert "length=3" not in str(traced)
