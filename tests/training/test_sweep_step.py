"""One step of many prompts gives each the result of a separate step."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from prompt_tuning.core import parameter_groups
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.models.build import build_model
from prompt_tuning.prompts.soft import PaddedPrompt
from prompt_tuning.training.gradients import gradients
from prompt_tuning.training.member_batches import pad_to_widest
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step import compile_step
from prompt_tuning.training.sweep_step import (
    compile_sweep_step,
    members_at_once,
    prompt_counts,
    stack_members,
)
from scripts.bench import hlo
from tests.support import dummies, meshes, methods
from tests.support.exhaustive import sample

PROMPT_PATH = {
    "llama": "decoder/prompt/prompt",
    "gpt2": "decoder/prompt/prompt",
    "t5_original": "encoder/prompt/prompt",
    "t5_gated": "encoder/prompt/prompt",
}
SIZES = [(4, 3), (1, 5), (6, 1), (3, 3)]
RATES = (0.3, 0.03)
STEPS = 3


def computed_in_float64(config: ModelConfig) -> ModelConfig:
    """The config with float64 computation, which runs do not support."""
    copy = dataclasses.replace(config)
    object.__setattr__(copy, "compute_dtype", "float64")
    return copy


def random_prompts(config: ModelConfig, lengths) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(7), len(lengths))
    return [
        jax.random.normal(key, (length, config.width))
        for key, length in zip(keys, lengths, strict=True)
    ]


def make_batches(config: ModelConfig, count: int) -> list[Batch]:
    """The same number of batches with other rows, some of them longer."""
    return [
        dummies.make_batch(
            config, dummies.random_rows([(a + i % 2, b) for a, b in SIZES], seed=i)
        )
        for i in range(count)
    ]


def padded_graph(config: ModelConfig, length: int) -> nnx.GraphDef:
    """The structure of a model with a prompt of that maximum length."""
    prompt = PaddedPrompt(jnp.zeros((length, config.width), "float32"), length)
    return dummies.abstract(lambda key: build_model(key, config, prompt))[0]


def start(
    config: ModelConfig, family: str, prompt: jax.Array, optimizer, seed: int = 0
) -> tuple:
    """Structure, state and frozen parameters of a member's separate run."""
    length = prompt.shape[0]
    graph, parameters = dummies.prompted(config, length=length)
    if config.compute_dtype == "float64":
        parameters = {p: x.astype(jnp.float64) for p, x in parameters.items()}
        prompt = prompt.astype(jnp.float64)
    path = PROMPT_PATH[family]
    state = TrainState.create({path: prompt}, optimizer, jax.random.key(seed))
    return graph, state, {p: x for p, x in parameters.items() if p != path}


def optimizers(rates=RATES) -> list[optax.GradientTransformation]:
    return [parameter_groups.adafactor(rate) for rate in rates]


def run_alone(graph, state, frozen, optimizer, batches, dropout=False):
    """The trained leaves and the metrics of each step of a run."""
    step = compile_step(graph, optimizer, dropout=dropout)
    state, outcome = jax.tree.map(jnp.copy, state), []
    for batch in batches:
        state, metrics = step(state, frozen, batch)
        outcome.append(jax.tree.map(np.asarray, (state.trained, metrics)))
    return outcome


def run_together(
    graph, states, frozen, chosen, batches, *, own_batches, dropout=False, at_once=None
):
    step = compile_sweep_step(
        graph, chosen, own_batches=own_batches, dropout=dropout, at_once=at_once
    )
    states, outcome = jax.tree.map(jnp.copy, tuple(states)), []
    for batch in batches:
        states, metrics = step(states, frozen, batch)
        trained = [jax.tree.map(np.asarray, state.trained) for state in states]
        outcome.append(list(zip(trained, metrics, strict=True)))
    assert step.programs == 1
    return outcome


def check_equal(together, alone, tolerance: float, loss_tolerance: float) -> None:
    """Each step of each member."""
    for step, members in enumerate(together):
        for k, (trained, metrics) in enumerate(members):
            expected, expected_metrics = alone[k][step]
            for name, value in expected_metrics.items():
                np.testing.assert_allclose(
                    metrics[name], value, rtol=loss_tolerance, err_msg=f"{k} {name}"
                )
            for path, leaf in expected.items():
                assert trained[path].shape == leaf.shape
                np.testing.assert_allclose(trained[path], leaf, atol=tolerance)


def members(family: str, lengths, own_batches: bool, double: bool) -> tuple:
    """The config, and each member's optimizer, start and batches."""
    config = dummies.FAMILIES[family]
    config = computed_in_float64(config) if double else config
    chosen = optimizers()
    starts = [
        start(config, family, prompt, optimizer)
        for prompt, optimizer in zip(
            random_prompts(config, lengths), chosen, strict=True
        )
    ]
    each = [make_batches(config, STEPS)] * len(chosen)
    if own_batches:
        each = [make_batches(config, STEPS + k)[k:] for k in range(len(chosen))]
    return config, chosen, starts, each


@functools.cache
def separate_results(family: str, lengths, own_batches: bool, double: bool) -> list:
    """The results of each member's separate run."""
    _, chosen, starts, each = members(family, lengths, own_batches, double)
    return [
        run_alone(graph, state, frozen, optimizer, pad_to_widest(batches, 0))
        for (graph, state, frozen), optimizer, batches in zip(
            starts, chosen, each, strict=True
        )
    ]


def compare(
    family: str, lengths, *, own_batches: bool, double: bool, at_once=None
) -> None:
    config, chosen, starts, each = members(family, lengths, own_batches, double)
    steps = list(zip(*each, strict=True))
    together = [batches[0] for batches in steps]
    if own_batches:
        padded = [pad_to_widest(batches, 0) for batches in steps]
        # One shape for all steps, so that a second compilation would be noticed.
        flat = pad_to_widest([batch for batches in padded for batch in batches], 0)
        count = len(chosen)
        together = [
            jax.tree.map(lambda *x: np.stack(x), *flat[i : i + count])
            for i in range(0, len(flat), count)
        ]
    else:
        together = pad_to_widest(together, 0)
    graph, _, frozen = starts[0]
    if len(set(lengths)) > 1:
        graph = padded_graph(config, max(lengths))
    states = [state for _, state, _ in starts]
    members_together = run_together(
        graph,
        states,
        frozen,
        chosen,
        together,
        own_batches=own_batches,
        at_once=at_once,
    )
    alone = separate_results(family, lengths, own_batches, double)
    check_equal(
        members_together, alone, 1e-9 if double else 1e-4, 1e-9 if double else 1e-5
    )


@pytest.fixture
def double(monkeypatch):
    """Computes everything in float64, even what is cast to float32."""
    monkeypatch.setattr(jnp, "float32", jnp.float64)
    with jax.enable_x64(True):
        yield


CASES = [
    # family, lengths of the prompts, whether each member has its own batches
    ("llama", (3, 3), False),
    ("llama", (2, 5), False),
    ("llama", (5, 2), True),
    ("gpt2", (1, 4), False),
    ("t5_original", (3, 3), True),
    ("t5_gated", (2, 5), True),
    ("t5_gated", (5, 2), False),
]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("family, lengths, own_batches", sample(1, CASES))
def test_each_member_equals_its_own_run_in_float64(family, lengths, own_batches):
    compare(family, lengths, own_batches=own_batches, double=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, lengths, own_batches", sample(1, [CASES[1], CASES[5]])
)
def test_each_member_equals_its_own_run_in_float32(family, lengths, own_batches):
    compare(family, lengths, own_batches=own_batches, double=False)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    "family, lengths, own_batches", sample(1, [CASES[2], CASES[6]])
)
def test_members_equal_their_own_runs_in_groups_too(family, lengths, own_batches):
    compare(family, lengths, own_batches=own_batches, double=True, at_once=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", [methods.BIASES, methods.INVOKED])
def test_members_with_adapters_equal_their_own_runs(method):
    config, chosen = dummies.FAMILIES["gpt2"], optimizers()
    graph, parameters, _ = meshes.tuned(config, method)
    # A bias of keys shifts all scores of a query alike: its gradient is rounding.
    chosen_paths = [x for x in parameters if "/adapters/" in x and "key/" not in x]
    trained = {path: parameters[path] for path in chosen_paths}
    frozen = {path: x for path, x in parameters.items() if path not in trained}
    states = [TrainState.create(trained, x, jax.random.key(0)) for x in chosen]
    batches = pad_to_widest(make_batches(config, STEPS), 0)
    together = run_together(graph, states, frozen, chosen, batches, own_batches=False)
    alone = [
        run_alone(graph, state, frozen, optimizer, batches)
        for state, optimizer in zip(states, chosen, strict=True)
    ]
    check_equal(together, alone, 1e-4, 1e-5)
    changed = alone[0][-1][0]
    assert all(np.abs(changed[path] - trained[path]).max() > 0 for path in trained)


def test_a_cpu_trains_a_useful_number_of_members_together():
    stacked = {"decoder/prompt/prompt": jnp.zeros((8, 20, 4))}

    def chosen(rows, count=8):
        batch = dummies.make_batch(dummies.LLAMA, [([1] * 16, [2] * 16)] * rows)
        return members_at_once(count, stacked, batch)

    assert [chosen(rows) for rows in (1, 8, 16, 64)] == [8, 4, 3, 1]
    assert chosen(8, count=9) == 5


def two_starts(family="llama", **changes):
    """Two members whose runs have other prompts and learning rates."""
    config = dataclasses.replace(dummies.FAMILIES[family], **changes)
    chosen = optimizers((0.3, 0.01))
    prompts = random_prompts(config, (3, 3))
    starts = [
        start(config, family, prompt, optimizer, seed=k)
        for k, (prompt, optimizer) in enumerate(zip(prompts, chosen, strict=True))
    ]
    return config, chosen, starts


@pytest.mark.exhaustive
def test_members_have_their_own_dropout_keys():
    config, chosen, starts = two_starts(dropout_rate=0.3)
    batches = pad_to_widest(make_batches(config, 2), 0)
    graph, _, frozen = starts[0]
    states = [state for _, state, _ in starts]
    members_together = run_together(
        graph, states, frozen, chosen, batches, own_batches=False, dropout=True
    )
    alone = [
        run_alone(graph, state, frozen, optimizer, batches, dropout=True)
        for state, optimizer in zip(states, chosen, strict=True)
    ]
    check_equal(members_together, alone, 1e-5, 1e-5)
    swapped = [
        dataclasses.replace(state, key=other.key)
        for state, other in zip(states, states[::-1], strict=True)
    ]
    others = run_together(
        graph, swapped, frozen, chosen, batches[:1], own_batches=False, dropout=True
    )
    assert abs(others[0][0][1]["loss"] - members_together[0][0][1]["loss"]) > 1e-3


@pytest.mark.exhaustive
def test_clipping_and_second_moments_stay_with_each_member():
    """An optimizer over the stacked prompts would give different numbers."""
    config, _, starts = two_starts()
    optimizer = parameter_groups.adafactor(0.3)
    graph, _, frozen = starts[0]
    # The second prompt is far away, where gradients are small and grow as it moves.
    states = [state for _, state, _ in starts]
    path = PROMPT_PATH["llama"]
    far = {path: states[1].trained[path] * 30}
    states[1] = TrainState.create(far, optimizer, states[1].key)
    batches = pad_to_widest(make_batches(config, 4), 0)
    chosen = [optimizer, optimizer]
    members_together = run_together(
        graph, states, frozen, chosen, batches, own_batches=False
    )
    alone = [run_alone(graph, s, frozen, optimizer, batches) for s in states]
    check_equal(members_together, alone, 1e-4, 1e-5)

    compute = jax.jit(jax.vmap(functools.partial(gradients, graph), (0, *[None] * 3)))
    mixed: Any = stack_members([state.trained for state in states])
    memory = optimizer.init(mixed)
    for batch in batches:
        gradient, _ = compute(mixed, frozen, batch, None)
        updates, memory = optimizer.update(gradient, memory, mixed)
        mixed = optax.apply_updates(mixed, updates)
    apart = np.stack([outcome[-1][0][path] for outcome in alone])
    assert np.abs(np.asarray(mixed[path]) - apart).max() > 1e-2


@pytest.mark.slow
def test_a_member_with_nonfinite_numbers_does_not_affect_the_others():
    config, chosen, starts = two_starts()
    batches = pad_to_widest(make_batches(config, 2), 0)
    graph, _, frozen = starts[0]
    states = [state for _, state, _ in starts]
    whole = run_together(graph, states, frozen, chosen, batches, own_batches=False)
    path = PROMPT_PATH["llama"]
    lost = {path: jnp.full_like(states[0].trained[path], jnp.nan)}
    states[0] = dataclasses.replace(states[0], trained=lost)
    members_together = run_together(
        graph, states, frozen, chosen, batches, own_batches=False
    )
    for step in range(2):
        assert np.isnan(members_together[step][0][1]["loss"])
        np.testing.assert_array_equal(
            members_together[step][1][0][path], whole[step][1][0][path]
        )


@pytest.mark.parametrize("family", sample(1, ["llama", "t5_gated"]))
def test_the_program_has_one_copy_of_the_frozen_weights(family):
    """At most K times the products of one run, with one copy of the weights."""
    config, optimizer = dummies.FAMILIES[family], parameter_groups.adafactor(0.3)
    (batch,) = make_batches(config, 1)
    # The number of positions then differs from the size of the vocabulary.
    (prompt,) = random_prompts(config, (4,))
    graph, state, frozen = start(config, family, prompt, optimizer)
    alone = compile_step(graph, optimizer, dropout=False)
    one = alone.lower(state, frozen, batch).compile()
    count = 3
    step = compile_sweep_step(
        graph, [optimizer] * count, own_batches=False, dropout=False
    )
    together = step.lower((state,) * count, frozen, batch).compile()

    def argument_bytes(compiled):
        return compiled.memory_analysis().argument_size_in_bytes

    added = sum(leaf.nbytes for leaf in jax.tree.leaves(state.trained))
    added += sum(np.asarray(x).nbytes for x in jax.tree.leaves(state.optimizer_state))
    grown = argument_bytes(together) - argument_bytes(one)
    assert 0 < grown <= (count - 1) * (added + 64)
    assert hlo.matmul_flops(together) <= count * hlo.matmul_flops(one)
    text = together.as_text() or ""
    for path, leaf in frozen.items():
        if leaf.ndim > 1:
            copied = ",".join(map(str, (count, *leaf.shape)))
            assert f"[{copied}]" not in text, path


def test_prompts_of_different_lengths_are_stacked_with_their_lengths():
    short, long = jnp.ones((2, 4)), jnp.ones((5, 4))
    members = [{"decoder/prompt/prompt": leaf} for leaf in (short, long)]
    (stacked,) = stack_members(members).values()
    assert stacked.shape == (2, 5, 4)
    np.testing.assert_array_equal(stacked.sum((1, 2)), [8, 20])
    (actual,) = prompt_counts(members).items()
    assert actual[0] == "decoder/prompt/real" and actual[1].tolist() == [2, 5]
    assert prompt_counts(members[:1] * 2) == {}


def test_batches_of_other_shapes_are_padded_with_filling_rows():
    first = dummies.make_batch(dummies.T5_GATED, [((3, 4, 5), (6,))])
    second = dummies.make_batch(dummies.T5_GATED, [((3,), (4, 5)), ((7,), (8, 9))])
    padded, other = pad_to_widest([first, second], pad_id=1)
    shapes = [x.shape for x in jax.tree.leaves(padded)]
    assert shapes == [x.shape for x in jax.tree.leaves(other)]
    np.testing.assert_array_equal(padded.tokens, [[3, 4, 5], [1, 1, 1]])
    np.testing.assert_array_equal(padded.lengths, [3, 1])
    np.testing.assert_array_equal(padded.targets, [[6, 1], [1, 1]])
    np.testing.assert_array_equal(padded.loss_weights, [[1, 0], [0, 0]])
    np.testing.assert_array_equal(other.tokens[:, 0], second.tokens[:, 0])
    assert padded.segment_ids is None
