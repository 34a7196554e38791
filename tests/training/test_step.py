import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.core import parameter_groups
from prompt_tuning.losses.foreign_objective import FunctionObjective
from prompt_tuning.models.scoring import loss_sums
from prompt_tuning.pretrained.frozen_fingerprint import fingerprint
from prompt_tuning.settings.prompting import Prompting
from prompt_tuning.training.gradients import gradients
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step import compile_step, update
from tests.support import dummies

PROMPT_PATH = {
    "llama": "decoder/prompt/prompt",
    "gpt2": "decoder/prompt/prompt",
    "t5_original": "encoder/prompt/prompt",
    "t5_gated": "encoder/prompt/prompt",
}
# Rows of unequal length and weight, so that a mean of means would be detected.
SIZES = [(4, 3), (1, 5), (6, 1), (3, 3), (2, 2), (5, 2), (1, 1), (4, 4)]


def whole_batch(config):
    return dummies.make_batch(config, dummies.random_rows(SIZES))


def prepared(family, regex, optimizer=None):
    """Structure, optimizer, state and frozen parameters of a run before its start."""
    graph, parameters = dummies.prompted(dummies.FAMILIES[family])
    groups = [
        parameter_groups.ParameterGroup(
            (regex,), optimizer or parameter_groups.adafactor(0.3)
        )
    ]
    labels = parameter_groups.label(parameters, groups)
    trained, frozen = parameter_groups.partition(parameters, labels)
    optimizer = parameter_groups.group_optimizer(groups, labels)
    state = TrainState.create(trained, optimizer, jax.random.key(1))
    return graph, optimizer, state, frozen


@pytest.mark.parametrize("family", ["llama", "t5_gated"])
def test_only_the_prompt_is_changed_and_returned(family):
    graph, optimizer, state, frozen = prepared(family, r".*/prompt/.*")
    before = {path: np.array(leaf) for path, leaf in frozen.items()}
    prompt = np.array(state.trained[PROMPT_PATH[family]])
    step = compile_step(graph, optimizer, dropout=False)
    batch = whole_batch(dummies.FAMILIES[family])
    outputs = jax.eval_shape(step, state, frozen, batch)
    following, metrics = step(state, frozen, batch)

    assert following.trained.keys() == {PROMPT_PATH[family]}
    moved = np.abs(following.trained[PROMPT_PATH[family]] - prompt)
    # The first step of Adafactor: each number moves by the learning rate.
    np.testing.assert_allclose(moved, 0.3, rtol=1e-3)
    for path, leaf in before.items():
        np.testing.assert_array_equal(frozen[path], leaf)
    # The prompt, its second moments and scalars: no frozen leaf is returned.
    arrays = [leaf.size for leaf in jax.tree.leaves(outputs) if leaf.size > 1]
    assert arrays == [prompt.size] * 2
    assert following.step == 1
    assert all(np.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize(("rate", "traces"), [(0.3, 1), (0.2, 2)])
def test_equal_steps_are_traced_and_compiled_once(rate, traces):
    traced = []

    def loss(logits, targets):
        traced.append(logits)
        return jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]

    batch = whole_batch(dummies.LLAMA)
    for each in (0.3, rate):
        optimizer = parameter_groups.adafactor(each)
        graph, optimizer, state, frozen = prepared("llama", ".*/prompt/.*", optimizer)
        objective = FunctionObjective(loss)
        step = compile_step(graph, optimizer, dropout=False, objective=objective)
        step(state, frozen, batch)
    assert len(traced) == traces


@pytest.mark.slow
def test_full_tuning_uses_the_same_code():
    graph, optimizer, state, frozen = prepared(
        "llama", ".*", parameter_groups.adamw(0.01)
    )
    assert not frozen
    before = {path: np.array(leaf) for path, leaf in state.trained.items()}
    step = compile_step(graph, optimizer, dropout=False)
    batch = whole_batch(dummies.LLAMA)
    losses = []
    for _ in range(5):
        state, metrics = step(state, frozen, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.8 * losses[0]
    for path, leaf in before.items():
        assert not np.array_equal(state.trained[path], leaf), path


def test_a_gradient_has_only_the_trained_leaves():
    graph, _, state, frozen = prepared("gpt2", r".*/prompt/.*|.*/mlp/down/bias")
    shapes = jax.eval_shape(
        functools.partial(gradients, graph),
        state.trained,
        frozen,
        whole_batch(dummies.GPT2),
        None,
    )[0]
    assert {path: leaf.shape for path, leaf in shapes.items()} == {
        "decoder/prompt/prompt": (3, 16),
        "decoder/layers/mlp/down/bias": (2, 16),
    }


@pytest.mark.slow
def test_accumulated_micro_batches_equal_one_batch():
    batch = whole_batch(dummies.GPT2)
    micro_batches = jax.tree.map(lambda x: x.reshape(2, 4, *x.shape[1:]), batch)
    graph, _, state, frozen = prepared("gpt2", r".*/prompt/.*")
    compute = jax.jit(functools.partial(gradients, graph))
    whole, sums = compute(state.trained, frozen, batch, None)
    parts, added = compute(state.trained, frozen, micro_batches, None)
    path = PROMPT_PATH["gpt2"]
    np.testing.assert_allclose(parts[path], whole[path], atol=1e-6)
    np.testing.assert_allclose(added, sums, rtol=1e-6)
    assert float(sums.weight) == sum(size for _, size in SIZES)


@pytest.mark.exhaustive
def test_each_micro_batch_has_its_own_dropout_key():
    config = dummies.with_dropout(dummies.GPT2)
    joined = Prompting(execution="joined")
    graph, parameters = dummies.prompted(config, prompting=joined)
    trained, frozen = parameter_groups.partition(parameters, {PROMPT_PATH["gpt2"]: 0})
    batch, key = whole_batch(config), jax.random.key(3)
    twice = jax.tree.map(lambda x: np.stack([x, x]), batch)
    _, both = jax.jit(functools.partial(gradients, graph))(trained, frozen, twice, key)
    sums = jax.jit(functools.partial(loss_sums, graph))
    each = [sums(parameters, batch, jax.random.fold_in(key, i)).loss for i in range(2)]
    assert abs(each[0] - each[1]) > 1e-2
    np.testing.assert_allclose(both.loss, each[0] + each[1], rtol=1e-5)


def test_a_position_without_weight_changes_nothing():
    graph, parameters = dummies.prompted(dummies.LLAMA)
    sums = jax.jit(functools.partial(loss_sums, graph))
    batch = whole_batch(dummies.LLAMA)
    elsewhere = np.where(batch.loss_weights > 0, batch.loss_positions, 2)
    moved = dataclasses.replace(batch, loss_positions=elsewhere)
    assert np.any(elsewhere != batch.loss_positions)
    np.testing.assert_allclose(sums(parameters, moved), sums(parameters, batch))


@pytest.mark.slow
def test_metrics_are_computed_before_the_update():
    graph, optimizer, state, frozen = prepared("llama", r".*/prompt/.*")
    batch = whole_batch(dummies.LLAMA)
    prompt = np.array(state.trained["decoder/prompt/prompt"])
    sums = jax.jit(functools.partial(loss_sums, graph))(state.trained | frozen, batch)
    step = compile_step(graph, optimizer, dropout=False)
    _, metrics = step(state, frozen, batch)
    weight = sum(size for _, size in SIZES)
    np.testing.assert_allclose(metrics["loss"], sums.loss / weight, rtol=1e-6)
    np.testing.assert_allclose(metrics["accuracy"], sums.correct / weight)
    norms = np.linalg.norm(prompt, axis=1)
    np.testing.assert_allclose(metrics["prompt_norm"], norms.mean(), rtol=1e-6)


def test_the_norm_of_prompts_is_of_vectors_only():
    """Other parameters of a prompt, and scalars, do not count."""
    leaves = {
        "encoder/prompt/prompt": jnp.array([[3.0, 4.0], [6.0, 8.0]]),
        "decoder/prompt/prompt": jnp.array([[[5.0, 12.0]]]),
        "decoder/prompt/mlp/kernel": jnp.full((2, 2), 100.0),
        "other/prompt/prompt": jnp.array(100.0),
    }
    optimizer = parameter_groups.adafactor(0.3)
    state = TrainState.create(leaves, optimizer, jax.random.key(0))
    gradient = {path: jnp.zeros_like(leaf) for path, leaf in leaves.items()}
    step = jax.jit(lambda s, g: update(s, g, {}, optimizer)[1])
    metrics = step(state, gradient)
    np.testing.assert_allclose(metrics["prompt_norm"], (5 + 10 + 13) / 3, rtol=1e-6)

    without = {"decoder/prompt/mlp/kernel": leaves["decoder/prompt/mlp/kernel"]}
    state = TrainState.create(without, optimizer, jax.random.key(0))
    assert "prompt_norm" not in step(state, {p: gradient[p] for p in without})


def test_a_fingerprint_distinguishes_models():
    _, frozen = dummies.unprompted(dummies.GPT2)
    print_ = fingerprint(frozen)
    assert fingerprint(dict(reversed(frozen.items()))) == print_
    other = dict(frozen)
    path = "decoder/final_norm/bias"
    other[path] = frozen[path].at[-1].add(1e-6)
    assert fingerprint(other) != print_
    assert fingerprint({**frozen, path: frozen[path][None]}) != print_
    assert fingerprint({k: v for k, v in frozen.items() if k != path}) != print_


@pytest.mark.slow
def test_micro_batches_are_summed_in_float32():
    config = dataclasses.replace(dummies.LLAMA, compute_dtype="bfloat16")
    graph, frozen = dummies.prompted(config)
    path = "decoder/prompt/prompt"
    trained = {path: frozen.pop(path)}
    one = dummies.make_batch(config, dummies.random_rows([(4, 3)]))
    count = 512
    many = jax.tree.map(lambda x: np.broadcast_to(x, (count, *x.shape)), one)
    compute = jax.jit(functools.partial(gradients, graph))
    alone, _ = compute(trained, frozen, one, None)
    added, _ = compute(trained, frozen, many, None)
    np.testing.assert_allclose(added[path], alone[path], rtol=0.05, atol=1e-3)
