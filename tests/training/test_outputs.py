"""Steps as named outputs whose gradients are set when they run."""

import dataclasses
import functools
import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prompt_tuning import optim
from prompt_tuning.errors import InputError
from prompt_tuning.losses.objective import PolicyGradient
from prompt_tuning.models.parameters import merge
from prompt_tuning.training import outputs
from prompt_tuning.training.outputs import OutputStep
from prompt_tuning.training.step import gradients
from scripts import hlo
from tests import dummies
from tests.losses.chunks import chunked

pytestmark = pytest.mark.usefixtures("quick_compile")

PROMPT = "decoder/prompt/prompt"
SIZES = [(4, 3), (1, 5), (6, 1), (3, 3)]
B, M, V = 4, 5, dummies.V
RANDOM = np.random.default_rng(0)


def prepared(family="llama", **changes):
    """Structure, trained and frozen leaves, and a batch of unequal weights."""
    config = dataclasses.replace(dummies.FAMILIES[family], **changes)
    graph, parameters = dummies.prompted(config)
    path = f"{dummies.PROMPT_PATHS[config.architecture]}/prompt"
    trained, frozen = optim.partition(parameters, {path: 0})
    batch = dummies.make_batch(config, dummies.random_rows(SIZES))
    weights = batch.loss_weights * RANDOM.uniform(0.5, 2, batch.loss_weights.shape)
    batch = dataclasses.replace(batch, loss_weights=weights.astype("f4"))
    return graph, trained, frozen, jax.tree.map(jnp.asarray, batch)


def numbers(*shape):
    return jnp.asarray(RANDOM.standard_normal(shape), jnp.float32)


def assert_same(found, expected, **tolerances):
    assert found.keys() == expected.keys()
    for path, leaf in found.items():
        np.testing.assert_allclose(leaf, expected[path], **tolerances)


@pytest.mark.parametrize("family", ["llama", "t5_gated"])
def test_the_usual_loss_is_one_choice_of_output_gradients(family):
    graph, trained, frozen, batch = prepared(family)
    usual = outputs.mean_loss(batch)
    found, gradient = OutputStep(graph)(trained, frozen, batch, usual)
    expected, sums = jax.jit(functools.partial(gradients, graph))(
        trained, frozen, batch, None
    )
    assert_same(gradient, expected, atol=1e-6)
    assert max(np.abs(leaf).max() for leaf in gradient.values()) > 1e-3
    total = np.sum(batch.loss_weights * found["token_nll"])
    np.testing.assert_allclose(total, sums.loss, rtol=1e-5)


def test_output_gradients_are_zeros_until_set():
    graph, trained, frozen, batch = prepared()
    _, gradient = OutputStep(graph)(trained, frozen, batch, {})
    np.testing.assert_array_equal(gradient[PROMPT], jnp.zeros((3, 16)))


def test_output_gradients_are_set_without_a_new_compile_and_add_up():
    graph, trained, frozen, batch = prepared()
    step = OutputStep(graph, ("token_nll", "hidden", "logits", "prompt_norm"))
    shapes = step.shapes(trained, frozen, batch)
    assert {name: x.shape for name, x in shapes.items()} == {
        "token_nll": (B, M),
        "hidden": (B, M, 16),
        "logits": (B, M, V),
        "prompt_norm": (),
    }
    given = {name: numbers(*x.shape) for name, x in shapes.items()}
    _, together = step(trained, frozen, batch, given)
    apart = [step(trained, frozen, batch, {n: x})[1] for n, x in given.items()]
    for one in apart:
        assert np.abs(one[PROMPT]).max() > 1e-3
    total = sum(one[PROMPT] for one in apart)
    np.testing.assert_allclose(together[PROMPT], total, atol=2e-5)
    assert step.jitted._cache_size() == 1


def plain_outputs(graph, parameters, batch):
    """The outputs again, of all logits and without a backward pass of ours."""
    model: Any = merge(graph, parameters)
    hidden = model.hidden(batch)
    logits = model.logits(hidden)
    targets = jnp.take_along_axis(batch.targets, batch.loss_positions, axis=1)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    norm = jnp.linalg.norm(parameters[PROMPT], axis=-1).mean()
    return {"token_nll": nll, "logits": logits, "prompt_norm": norm}


@pytest.mark.parametrize("start", ["ones", "random"])
def test_ones_and_random_gradients_are_those_of_a_weighted_sum(start):
    graph, trained, frozen, batch = prepared()
    step = OutputStep(graph, ("token_nll", "logits", "prompt_norm"))
    shapes = step.shapes(trained, frozen, batch)
    given = outputs.ones(shapes)
    if start == "random":
        given = outputs.random_normal(shapes, jax.random.key(0))
        assert len({float(x.ravel()[0]) for x in given.values()}) == len(given)

    def weighted(trained):
        found = plain_outputs(graph, trained | frozen, batch)
        return sum(jnp.vdot(given[name], found[name]) for name in given)

    found, gradient = step(trained, frozen, batch, given)
    assert_same(gradient, jax.jit(jax.grad(weighted))(trained), atol=5e-5)
    plain = jax.jit(functools.partial(plain_outputs, graph))(trained | frozen, batch)
    assert_same(found, plain, rtol=1e-4, atol=1e-5)


def test_advantages_push_texts_up_and_down():
    graph, trained, frozen, batch = prepared()
    batch = dataclasses.replace(batch, advantages=numbers(B, M))
    given = outputs.policy_gradient(batch)
    _, gradient = OutputStep(graph)(trained, frozen, batch, given)
    compute = functools.partial(gradients, graph, objective=PolicyGradient())
    expected, _ = jax.jit(compute)(trained, frozen, batch, None)
    assert_same(gradient, expected, atol=1e-6)

    def surrogate(trained):
        nll = plain_outputs(graph, trained | frozen, batch)["token_nll"]
        weighted = batch.loss_weights * batch.advantages * nll
        return jnp.sum(weighted) / jnp.sum(batch.loss_weights)

    assert_same(gradient, jax.jit(jax.grad(surrogate))(trained), atol=1e-5)


def test_advantages_of_one_are_the_usual_loss():
    _, _, _, batch = prepared()
    batch = dataclasses.replace(batch, advantages=jnp.ones((B, M)))
    found, usual = outputs.policy_gradient(batch), outputs.mean_loss(batch)
    assert_same(found, usual, rtol=1e-6)


def test_a_teachers_logits_are_learned_by_the_gradient_of_the_divergence():
    graph, trained, frozen, batch = prepared()
    step, teacher = OutputStep(graph, ("logits",)), numbers(B, M, V)
    found, _ = step(trained, frozen, batch, {})
    given = outputs.from_teacher(found["logits"], teacher, batch)
    _, gradient = step(trained, frozen, batch, given)

    def divergence(trained):
        logits = plain_outputs(graph, trained | frozen, batch)["logits"]
        losses = optax.losses.kl_divergence_with_log_targets(
            jax.nn.log_softmax(logits), jax.nn.log_softmax(teacher)
        )
        return jnp.average(losses, weights=batch.loss_weights)

    assert_same(gradient, jax.jit(jax.grad(divergence))(trained), atol=1e-5)


def test_micro_batches_add_up():
    graph, trained, frozen, batch = prepared()
    cut = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), batch)
    step = OutputStep(graph)
    whole = step(trained, frozen, batch, outputs.mean_loss(batch))
    parts = step(trained, frozen, cut, outputs.mean_loss(cut))
    assert_same(parts[1], whole[1], atol=1e-6)
    nll = parts[0]["token_nll"].reshape(B, M)
    np.testing.assert_allclose(nll, whole[0]["token_nll"], atol=1e-5)


def first_vector(model, batch):
    """An output of the user's own: squared numbers of the first prompt vector."""
    del batch
    return {"first_vector": jnp.square(model.decoder.prompt()[0])}


def test_a_function_adds_outputs_of_its_own():
    graph, trained, frozen, batch = prepared()
    step = OutputStep(graph, (), first_vector)
    weights = numbers(16)
    given = {"first_vector": weights}
    found, gradient = step(trained, frozen, batch, given)
    vector = np.array(trained[PROMPT][0])
    np.testing.assert_allclose(found["first_vector"], vector**2, rtol=1e-6)
    np.testing.assert_allclose(gradient[PROMPT][0], 2 * weights * vector, rtol=1e-5)
    np.testing.assert_array_equal(gradient[PROMPT][1:], jnp.zeros((2, 16)))


OTHER_V = 37
"""A vocabulary whose size no other dimension of the program has."""


def compiled(names, added=None):
    graph, trained, frozen, batch = prepared(vocabulary_size=OTHER_V)
    step = OutputStep(graph, names, added)
    zeros = outputs.filled({}, step.shapes(trained, frozen, batch))
    return step.jitted.lower(trained, frozen, batch, zeros, None).compile()


def of_vocabulary(program):
    """How often the head is multiplied, and the most scores of it that one array has.

    The head itself, `[V, D]`, is none of them.
    """
    products = [p for p in hlo.products(program) if has_scores(*p.shapes)]
    sizes = [math.prod(s) for s in hlo.array_shapes(program) if has_scores(s)]
    return len(products), max(sizes, default=0)


def has_scores(*shapes):
    return any(OTHER_V in shape and 16 not in shape for shape in shapes)


def test_nothing_is_computed_for_an_output_that_is_not_named(monkeypatch):
    chunked(monkeypatch, 4)
    whole = B * M * OTHER_V
    assert of_vocabulary(compiled(("hidden",))) == (0, 0)
    assert of_vocabulary(compiled(("prompt_norm",))) == (0, 0)
    products, largest = of_vocabulary(compiled(("token_nll",)))
    assert products == 2 and largest < whole
    products, largest = of_vocabulary(compiled(("token_nll", "logits")))
    assert products == 4 and largest >= whole


def test_the_model_is_not_run_for_what_is_of_the_prompt_alone():
    assert not hlo.products(compiled((), first_vector))


def test_what_is_no_output_is_refused():
    graph, trained, frozen, batch = prepared()
    with pytest.raises(InputError, match=r"named 'loss', expected some of token_nll"):
        OutputStep(graph, ("loss",))
    step = OutputStep(graph)
    with pytest.raises(InputError, match=r"set for 'logits', but .* are token_nll;"):
        step(trained, frozen, batch, {"logits": jnp.zeros((B, M, V))})
    with pytest.raises(InputError, match=r"shape \(4, 1\), expected .* \(4, 5\)"):
        step(trained, frozen, batch, {"token_nll": jnp.zeros((B, 1))})
    clash = OutputStep(graph, (), lambda model, batch: {"hidden": jnp.zeros(1)})
    with pytest.raises(InputError, match="the added output 'hidden' has the name"):
        clash(trained, frozen, batch, {})
    whole = OutputStep(graph, (), lambda model, batch: {"count": jnp.zeros(1, int)})
    with pytest.raises(InputError, match="'count' has type int32, expected a floating"):
        whole(trained, frozen, batch, {})
    with pytest.raises(InputError, match=r"set DataSource.advantages_key"):
        inspect.unwrap(outputs.policy_gradient)(batch)
