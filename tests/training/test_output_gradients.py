"""Steps with named outputs whose gradients are set when they run."""

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

from prompt_tuning.core import parameter_groups
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import merge
from prompt_tuning.core.rematerialization import Rematerialization
from prompt_tuning.losses.policy_gradient import PolicyGradient
from prompt_tuning.training import output_gradients
from prompt_tuning.training.gradients import gradients
from prompt_tuning.training.output_gradients import OutputStep
from scripts.bench import hlo
from tests.support import dummies
from tests.support.chunks import chunked
from tests.support.exhaustive import sample

PROMPT = "decoder/prompt/prompt"
SIZES = [(4, 3), (1, 5), (6, 1), (3, 3)]
B, T, M, V = 4, 7, 5, dummies.V
RANDOM = np.random.default_rng(0)
LEARNED = np.array([[g <= t < g + n for t in range(T)] for g, n in SIZES])
"""Weighted targets of a decoder-only batch: those after the given ones."""


def prepared(family="llama", **changes):
    """Structure, trained and frozen leaves, and a batch of unequal weights."""
    config = dataclasses.replace(dummies.FAMILIES[family], **changes)
    graph, parameters = dummies.prompted(config)
    path = f"{dummies.PROMPT_PATHS[config.architecture]}/prompt"
    trained, frozen = parameter_groups.partition(parameters, {path: 0})
    batch = dummies.make_batch(config, dummies.random_rows(SIZES))
    weights = batch.loss_weights * RANDOM.uniform(0.5, 2, batch.loss_weights.shape)
    batch = dataclasses.replace(batch, loss_weights=weights.astype("f4"))
    return graph, trained, frozen, jax.tree.map(jnp.asarray, batch)


def numbers(*shape):
    return jnp.asarray(RANDOM.standard_normal(shape), jnp.float32)


def assert_same(actual, expected, **tolerances):
    assert actual.keys() == expected.keys()
    for path, leaf in actual.items():
        np.testing.assert_allclose(leaf, expected[path], **tolerances)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", sample(1, ["llama", "t5_gated"]))
def test_the_usual_loss_is_a_special_case_of_output_gradients(family):
    graph, trained, frozen, batch = prepared(family)
    usual = output_gradients.mean_loss(batch)
    actual, gradient = OutputStep(graph)(trained, frozen, batch, usual)
    expected, sums = jax.jit(functools.partial(gradients, graph))(
        trained, frozen, batch, None
    )
    assert_same(gradient, expected, atol=1e-6)
    assert max(np.abs(leaf).max() for leaf in gradient.values()) > 1e-3
    weights = np.asarray(batch.targets, "f4") * 0
    for row, (given, learned) in enumerate(SIZES):
        first = given if family == "llama" else 0
        weights[row, first : first + learned] = batch.loss_weights[row, :learned]
    assert actual["token_nll"].shape == weights.shape
    np.testing.assert_allclose(
        np.sum(weights * actual["token_nll"]), sums.loss, rtol=1e-5
    )
    np.testing.assert_array_equal(actual["token_nll"] != 0, weights != 0)


def test_output_gradients_are_zeros_until_set():
    graph, trained, frozen, batch = prepared()
    _, gradient = OutputStep(graph)(trained, frozen, batch, {})
    np.testing.assert_array_equal(gradient[PROMPT], jnp.zeros((3, 16)))


def test_output_gradients_are_set_without_a_new_compile_and_add_up():
    graph, trained, frozen, batch = prepared()
    step = OutputStep(graph, ("token_nll", "hidden", "logits", "prompt_norm"))
    shapes = step.shapes(trained, frozen, batch)
    assert {name: x.shape for name, x in shapes.items()} == {
        "token_nll": (B, T),
        "hidden": (B, M, 16),
        "logits": (B, M, V),
        "prompt_norm": (),
    }
    given = {name: numbers(*x.shape) for name, x in shapes.items()}
    given["token_nll"] *= LEARNED
    _, together = step(trained, frozen, batch, given)
    apart = [step(trained, frozen, batch, {n: x})[1] for n, x in given.items()]
    for one in apart:
        assert np.abs(one[PROMPT]).max() > 1e-3
    total = sum(one[PROMPT] for one in apart)
    np.testing.assert_allclose(together[PROMPT], total, atol=2e-5)
    assert step.jitted._cache_size() == 1


def plain_outputs(graph, parameters, batch):
    """The outputs from all logits, without a custom backward pass."""
    model: Any = merge(graph, parameters)
    hidden = model.hidden(batch)
    logits = model.logits(hidden)
    targets = jnp.take_along_axis(batch.targets, batch.loss_positions, axis=1)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    norm = jnp.linalg.norm(parameters[PROMPT], axis=-1).mean()
    # In the order of the rows; each row lists its learned targets first.
    real = np.concatenate([np.arange(n) + row * M for row, (_, n) in enumerate(SIZES)])
    nll = jnp.zeros((B, T)).at[LEARNED].set(nll.ravel()[real])
    return {"token_nll": nll, "logits": logits, "prompt_norm": norm}


@pytest.mark.parametrize("start", sample(1, ["ones", "random"]))
def test_output_gradients_are_those_of_a_weighted_sum(start):
    graph, trained, frozen, batch = prepared()
    step = OutputStep(graph, ("token_nll", "logits", "prompt_norm"))
    shapes = step.shapes(trained, frozen, batch)
    given = output_gradients.ones(shapes, batch)
    if start == "random":
        given = output_gradients.random_normal(shapes, batch, jax.random.key(0))
        assert len({float(x.sum()) for x in given.values()}) == len(given)
    np.testing.assert_array_equal(given["token_nll"] != 0, LEARNED)

    def weighted(trained):
        actual = plain_outputs(graph, trained | frozen, batch)
        return sum(jnp.vdot(given[name], actual[name]) for name in given)

    actual, gradient = step(trained, frozen, batch, given)
    assert_same(gradient, jax.jit(jax.grad(weighted))(trained), atol=5e-5)
    plain = jax.jit(functools.partial(plain_outputs, graph))(trained | frozen, batch)
    assert_same(actual, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
def test_advantages_push_texts_up_and_down():
    graph, trained, frozen, batch = prepared()
    batch = dataclasses.replace(batch, columns={"advantages": numbers(B, M)})
    given = output_gradients.policy_gradient(batch)
    _, gradient = OutputStep(graph)(trained, frozen, batch, given)
    compute = functools.partial(gradients, graph, objective=PolicyGradient())
    expected, _ = jax.jit(compute)(trained, frozen, batch, None)
    assert_same(gradient, expected, atol=1e-6)

    real = batch.loss_weights != 0
    weighted = (batch.loss_weights * batch.columns["advantages"])[real]
    assert np.min(weighted) < 0 < np.max(weighted)

    def surrogate(trained):
        nll = plain_outputs(graph, trained | frozen, batch)["token_nll"][LEARNED]
        return jnp.sum(weighted * nll) / jnp.sum(batch.loss_weights)

    assert_same(gradient, jax.jit(jax.grad(surrogate))(trained), atol=1e-5)


def test_advantages_of_one_give_the_usual_loss():
    _, _, _, batch = prepared()
    batch = dataclasses.replace(batch, columns={"advantages": jnp.ones((B, M))})
    actual, usual = (
        output_gradients.policy_gradient(batch),
        output_gradients.mean_loss(batch),
    )
    assert_same(actual, usual, rtol=1e-6)


@pytest.mark.slow
def test_teacher_logits_train_with_the_gradient_of_the_divergence():
    graph, trained, frozen, batch = prepared()
    step, teacher = OutputStep(graph, ("logits",)), numbers(B, M, V)
    actual, _ = step(trained, frozen, batch, {})
    given = output_gradients.from_teacher(actual["logits"], teacher, batch)
    _, gradient = step(trained, frozen, batch, given)

    def divergence(trained):
        logits = plain_outputs(graph, trained | frozen, batch)["logits"]
        losses = optax.losses.kl_divergence_with_log_targets(
            jax.nn.log_softmax(logits), jax.nn.log_softmax(teacher)
        )
        return jnp.average(losses, weights=batch.loss_weights)

    assert_same(gradient, jax.jit(jax.grad(divergence))(trained), atol=1e-5)


@pytest.mark.exhaustive
def test_micro_batches_add_up():
    graph, trained, frozen, batch = prepared()
    cut = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), batch)
    step = OutputStep(graph)
    whole = step(trained, frozen, batch, output_gradients.mean_loss(batch))
    parts = step(trained, frozen, cut, output_gradients.mean_loss(cut))
    assert_same(parts[1], whole[1], atol=1e-6)
    nll = parts[0]["token_nll"].reshape(B, T)
    np.testing.assert_allclose(nll, whole[0]["token_nll"], atol=1e-5)


@pytest.mark.exhaustive
def test_micro_batches_use_the_dropout_of_training():
    graph, trained, frozen, batch = prepared(dropout_rate=0.3)
    cut = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), batch)
    usual, key = output_gradients.mean_loss(cut), jax.random.key(2)
    _, without = OutputStep(graph)(trained, frozen, cut, usual)
    _, gradient = OutputStep(graph)(trained, frozen, cut, usual, key)
    compute = jax.jit(functools.partial(gradients, graph))
    assert_same(gradient, compute(trained, frozen, cut, key)[0], atol=1e-6)
    assert np.abs(gradient[PROMPT] - without[PROMPT]).max() > 1e-2


@pytest.mark.slow
def test_micro_batches_compute_the_prompt_once():
    def flops(accumulate):
        graph, trained, frozen, batch = prepared()
        shape = (2, 2) if accumulate else (B,)
        batch = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), batch)
        step = OutputStep(graph, ("token_nll", "logits", "hidden"))
        zeros = output_gradients.fill_missing({}, step.shapes(trained, frozen, batch))
        lowered = step.jitted.lower(trained, frozen, batch, zeros, None)
        return hlo.matmul_flops(lowered.compile())

    assert flops(True) == flops(False)


@pytest.mark.slow
def test_a_gradient_of_an_uncomputed_output_is_refused():
    graph, trained, frozen, batch = prepared()
    step = OutputStep(graph)
    # Token 0 of row 2 is given, and padding in loss_positions points to target 0.
    for row, target in ((2, 0), (1, 6)):
        one = jnp.zeros((B, T)).at[row, target].set(1e-3)
        with pytest.raises(
            InputError, match=rf"set for 1 targets .* the first at \({row}, {target}\):"
        ):
            step(trained, frozen, batch, {"token_nll": one})
    everywhere = {"token_nll": jnp.ones((B, T))}
    with pytest.raises(InputError, match=f"for {B * T - LEARNED.sum()} targets"):
        step(trained, frozen, batch, everywhere)
    cut = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), batch)
    of_cut = jnp.zeros((2, 2, T)).at[1, 0, 0].set(1)
    with pytest.raises(InputError, match=r"first at \(1, 0, 0\)"):
        step(trained, frozen, cut, {"token_nll": of_cut})
    _, gradient = step(
        trained, frozen, batch, {"token_nll": jnp.asarray(LEARNED, "f4")}
    )
    assert np.abs(gradient[PROMPT]).max() > 1e-3


@pytest.mark.exhaustive
def test_padding_does_not_hide_a_rows_first_learned_target():
    """Each row pads `loss_positions` with 0, which is a learned target here."""
    config = dummies.LLAMA
    graph, parameters = dummies.prompted(config)
    batch = dummies.make_batch(config, dummies.random_rows([(0, 2), (0, 4)]))
    batch = jax.tree.map(jnp.asarray, batch)
    usual = output_gradients.mean_loss(batch)["token_nll"]
    np.testing.assert_allclose(usual, [[1 / 6] * 2 + [0] * 2, [1 / 6] * 4], rtol=1e-6)
    trained = {PROMPT: parameters.pop(PROMPT)}
    given = {"token_nll": jnp.zeros((2, 4)).at[0, 0].set(1)}
    actual, gradient = OutputStep(graph)(trained, parameters, batch, given)
    nll = np.asarray(actual["token_nll"])
    assert (nll[0, :2] > 0).all() and (nll[0, 2:] == 0).all() and (nll[1] > 0).all()

    def first(trained):
        model: Any = merge(graph, trained | parameters)
        scores = jax.nn.log_softmax(model.logits(model.hidden(batch))[0, 0])
        return -scores[batch.targets[0, 0]]

    value, expected = jax.jit(jax.value_and_grad(first))(trained)
    np.testing.assert_allclose(nll[0, 0], value, rtol=1e-5)
    assert_same(gradient, expected, atol=1e-5)


def first_vector(model, batch):
    """An added output: the squares of the first prompt vector."""
    del batch
    return {"first_vector": jnp.square(model.decoder.prompt()[0])}


def test_a_function_adds_its_own_outputs():
    graph, trained, frozen, batch = prepared()
    step = OutputStep(graph, (), first_vector)
    weights = numbers(16)
    given = {"first_vector": weights}
    actual, gradient = step(trained, frozen, batch, given)
    vector = np.array(trained[PROMPT][0])
    np.testing.assert_allclose(actual["first_vector"], vector**2, rtol=1e-6)
    np.testing.assert_allclose(gradient[PROMPT][0], 2 * weights * vector, rtol=1e-5)
    np.testing.assert_array_equal(gradient[PROMPT][1:], jnp.zeros((2, 16)))


OTHER_V = 37
"""Size of the vocabulary; no other dimension of the program has it."""


def compiled(names, added=None):
    graph, trained, frozen, batch = prepared(vocabulary_size=OTHER_V)
    step = OutputStep(graph, names, added)
    zeros = output_gradients.fill_missing({}, step.shapes(trained, frozen, batch))
    return step.jitted.lower(trained, frozen, batch, zeros, None).compile()


def products_with_head(program):
    """Returns the number of products with the head, and its largest array of scores.

    The head itself, `[V, D]`, does not count.
    """
    products = [p for p in hlo.products(program) if has_scores(*p.shapes)]
    sizes = [math.prod(s) for s in hlo.array_shapes(program) if has_scores(s)]
    return len(products), max(sizes, default=0)


def has_scores(*shapes):
    return any(OTHER_V in shape and 16 not in shape for shape in shapes)


@pytest.mark.exhaustive
def test_unnamed_outputs_are_not_computed(monkeypatch):
    chunked(monkeypatch, 4)
    whole = B * M * OTHER_V
    assert products_with_head(compiled(("hidden",))) == (0, 0)
    assert products_with_head(compiled(("prompt_norm",))) == (0, 0)
    products, largest = products_with_head(compiled(("token_nll",)))
    assert products == 2 and largest < whole
    products, largest = products_with_head(compiled(("token_nll", "logits")))
    assert products == 4 and largest >= whole


def test_outputs_of_only_the_prompt_do_not_run_the_model():
    assert not hlo.products(compiled((), first_vector))


def test_unknown_outputs_are_refused():
    graph, trained, frozen, batch = prepared()
    with pytest.raises(InputError, match=r"named 'loss', expected some of token_nll"):
        OutputStep(graph, ("loss",))
    step = OutputStep(graph)
    with pytest.raises(InputError, match=r"set for 'logits', but .* are token_nll;"):
        step(trained, frozen, batch, {"logits": jnp.zeros((B, M, V))})
    with pytest.raises(InputError, match=r"shape \(4, 1\), expected .* \(4, 7\)"):
        step(trained, frozen, batch, {"token_nll": jnp.zeros((B, 1))})
    clash = OutputStep(graph, (), lambda model, batch: {"hidden": jnp.zeros(1)})
    with pytest.raises(InputError, match="the added output 'hidden' has the name"):
        clash(trained, frozen, batch, {})
    whole = OutputStep(graph, (), lambda model, batch: {"count": jnp.zeros(1, int)})
    with pytest.raises(InputError, match="'count' has type int32, expected a floating"):
        whole(trained, frozen, batch, {})
    with pytest.raises(InputError, match=r"set DataSource.advantages_key"):
        inspect.unwrap(output_gradients.policy_gradient)(batch)


PATHS = ("decoder/layers/1/hidden", "decoder/layers/0/self_attention")


@pytest.mark.slow
@pytest.mark.parametrize("policy", sample(1, ["none", "nothing"]))
def test_an_intermediate_array_has_an_output_gradient(policy):
    """A gradient at the last block's output is one at the states that it yields."""
    graph, trained, frozen, batch = prepared(
        rematerialization=Rematerialization(policy=policy), layers=2
    )
    step = OutputStep(graph, ("hidden", *PATHS))
    shapes = step.shapes(trained, frozen, batch)
    assert [shapes[path].shape for path in PATHS] == [(B, T, 16)] * 2
    actual, _ = step(trained, frozen, batch)
    model: Any = merge(graph, trained | frozen)
    # The state that predicts the token after the first one is at the first token.
    row, column = 0, int(np.argmax(np.asarray(batch.loss_positions[0]) > 0))
    place = int(batch.loss_positions[row, column]) - 1
    last = actual[PATHS[0]][row, place]
    np.testing.assert_allclose(
        model.decoder.final_norm(last), actual["hidden"][row, column], atol=1e-5
    )
    direction = numbers(16)

    def normalized(state):
        return jnp.vdot(direction, model.decoder.final_norm(state))

    of_last = jnp.zeros_like(actual[PATHS[0]])
    of_last = of_last.at[row, place].set(jax.grad(normalized)(last))
    of_hidden = jnp.zeros_like(actual["hidden"]).at[row, column].set(direction)
    step.set_output_gradient(PATHS[0], of_last)
    _, gradient = step(trained, frozen, batch)
    _, expected = step(trained, frozen, batch, {"hidden": of_hidden})
    assert np.abs(expected[PROMPT]).max() > 1e-3
    assert_same(gradient, expected, atol=1e-5)
    assert step.jitted._cache_size() == 1
    step.set_output_gradient(PATHS[0], None)
    _, gradient = step(trained, frozen, batch)
    np.testing.assert_array_equal(gradient[PROMPT], jnp.zeros((3, 16)))


def test_the_gradient_of_an_attention_output_is_its_derivative():
    """Compared with the difference of the output at two prompts."""
    graph, trained, frozen, batch = prepared()
    step = OutputStep(graph, PATHS[1:])
    actual, _ = step(trained, frozen, batch)
    weights = numbers(*actual[PATHS[1]].shape)
    step.set_output_gradient(PATHS[1], weights)
    _, gradient = step(trained, frozen, batch)
    direction, small = numbers(3, 16), 1e-2
    ends = [
        step({PROMPT: trained[PROMPT] + sign * small * direction}, frozen, batch)[0]
        for sign in (1, -1)
    ]
    change = (ends[0][PATHS[1]] - ends[1][PATHS[1]]) / (2 * small)
    expected = float(jnp.vdot(weights, change))
    assert abs(expected) > 0.1
    assert float(jnp.vdot(gradient[PROMPT], direction)) == pytest.approx(
        expected, rel=1e-2
    )


@pytest.mark.parametrize("path", ["decoder/layers/7/mlp", "encoder/layers/0/mlp"])
def test_a_path_that_the_model_lacks_is_refused(path):
    graph, trained, frozen, batch = prepared()
    with pytest.raises(InputError, match=f"no intermediate array '{path}'"):
        OutputStep(graph, (path,))(trained, frozen, batch)
    with pytest.raises(InputError, match="is set for 'logits', but the step's outp"):
        OutputStep(graph).set_output_gradient("logits", jnp.zeros(()))
