"""Optimizer moments are carried over to another optimizer; schedules restart."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prompt_tuning.checkpoints.run_store.checkpoint_files import named_leaves
from prompt_tuning.core import learning_rates, parameter_groups
from prompt_tuning.training.optimizer_transfer import carry_over

PROMPT, LORA = "decoder/prompt/prompt", "decoder/layers/mlp/up/adapters/lora/a"
SHAPES = {PROMPT: (4, 8), LORA: (1, 8, 2)}


def numbers(seed: int, *paths: str) -> dict[str, jax.Array]:
    """Random values for each path, independent of the other paths."""

    def drawn(path: str) -> jax.Array:
        random = np.random.default_rng([seed, len(path)])
        return jnp.asarray(random.standard_normal(SHAPES[path]), "f4")

    return {path: drawn(path) for path in paths}


def grouped(paths, *groups):
    """Builds one optimizer from groups of (regex, optimizer)."""
    optimizer_groups = [
        parameter_groups.ParameterGroup([regex], optimizer)
        for regex, optimizer in groups
    ]
    return parameter_groups.group_optimizer(
        optimizer_groups, parameter_groups.label(paths, optimizer_groups)
    )


def stepped(optimizer, state, parameters: Any, seeds) -> tuple[Any, Any]:
    """State and parameters after steps with random gradients."""
    for seed in seeds:
        updates, state = optimizer.update(numbers(seed, *parameters), state, parameters)
        parameters = optax.apply_updates(parameters, updates)
    return state, parameters


def saved(state) -> dict[str, np.ndarray]:
    """Leaves by key path, as in a checkpoint."""
    return {name: np.asarray(leaf) for name, leaf in named_leaves(state).items()}


OPTIMIZERS = {
    "adam": parameter_groups.adamw(0.1),
    "adafactor": parameter_groups.adafactor(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_interrupted_run_ends_at_the_same_parameters(name):
    optimizer = grouped([PROMPT], (".*", OPTIMIZERS[name]))
    parameters = numbers(0, PROMPT)
    whole = stepped(optimizer, optimizer.init(parameters), parameters, range(1, 6))[1]
    state, half = stepped(
        optimizer, optimizer.init(parameters), parameters, range(1, 4)
    )
    carried = carry_over(saved(state), optimizer.init(half), [PROMPT])
    assert carried.paths == (PROMPT,) and not carried.shared_counts
    state = carried.insert_into(optimizer.init(half))
    end = stepped(optimizer, state, half, [4, 5])[1]
    np.testing.assert_array_equal(end[PROMPT], whole[PROMPT])
    forgetful = stepped(optimizer, optimizer.init(half), half, [4, 5])[1]
    assert not np.array_equal(forgetful[PROMPT], whole[PROMPT])


def test_state_carries_over_to_another_group_and_after_a_clip():
    before = grouped([PROMPT], (".*", parameter_groups.adamw(0.1)))
    parameters = numbers(0, PROMPT)
    state, half = stepped(before, before.init(parameters), parameters, [1, 2, 3])
    whole = stepped(before, state, half, [4])[1]
    both = half | numbers(9, LORA)
    after = grouped(
        both,
        (".*/lora/.*", optax.sgd(0.1)),
        (".*/prompt/.*", parameter_groups.adamw(0.1, clip_norm=1e9)),
    )
    carried = carry_over(saved(state), after.init(both), both)
    assert carried.paths == (PROMPT,)
    actual = stepped(after, carried.insert_into(after.init(both)), both, [4])[1]
    np.testing.assert_array_equal(actual[PROMPT], whole[PROMPT])


def test_a_transfer_resets_schedules_but_not_averages():
    optimizer = grouped(
        [PROMPT],
        (".*", parameter_groups.adamw(learning_rates.warmup_linear_decay(0.1, 20))),
    )
    parameters = numbers(0, PROMPT)
    state, half = stepped(optimizer, optimizer.init(parameters), parameters, [1, 2, 3])
    carried = carry_over(saved(state), optimizer.init(half), [PROMPT])
    actual = saved(carried.insert_into(optimizer.init(half)))
    counts = {name: int(x) for name, x in actual.items() if name.endswith(".count")}
    assert len(counts) == 2
    moments = next(name for name in actual if ".mu[" in name)
    for name, count in counts.items():
        assert count == (3 if name.startswith(moments.partition(".mu")[0]) else 0)


def test_state_of_another_shape_or_optimizer_is_not_carried_over():
    adam = grouped([PROMPT], (".*", parameter_groups.adamw(0.1)))
    parameters = numbers(0, PROMPT)
    state, _ = stepped(adam, adam.init(parameters), parameters, [1])
    wide = {PROMPT: jnp.zeros((5, 8))}
    for optimizer, template in (
        (adam, wide),
        (parameter_groups.adafactor(), parameters),
    ):
        new = grouped([PROMPT], (".*", optimizer)).init(template)
        carried = carry_over(saved(state), new, [PROMPT])
        assert carried.paths == () and carried.values == {}
        for old, put in zip(
            jax.tree.leaves(new), jax.tree.leaves(carried.insert_into(new)), strict=True
        ):
            np.testing.assert_array_equal(old, put)


def test_a_mixed_group_lists_fresh_leaves_and_counts_kept_ones():
    before = grouped([PROMPT], (".*", parameter_groups.adamw(0.1)))
    parameters = numbers(0, PROMPT)
    state, half = stepped(before, before.init(parameters), parameters, [1, 2, 3])
    both = half | numbers(9, LORA)
    after = grouped(both, (".*", parameter_groups.adamw(0.1)))
    carried = carry_over(saved(state), after.init(both), both)
    assert carried.paths == (PROMPT,) and carried.shared_counts == {LORA: 3}
    actual = saved(carried.insert_into(after.init(both)))
    for name, leaf in actual.items():
        if LORA in name:
            assert not leaf.any()
    # A group merged from groups with different step counts has the largest count.
    apart = grouped(
        both, (PROMPT, parameter_groups.adamw(0.1)), (LORA, parameter_groups.adamw(0.1))
    )
    later = saved(stepped(apart, apart.init(both), both, [4, 5])[0])
    for name in later:
        if name.startswith(".inner_states[0]") and name.endswith(".count"):
            later[name] = np.array(7, np.int32)
    carried = carry_over(later, after.init(both), both)
    assert set(carried.paths) == {PROMPT, LORA} and carried.shared_counts == {LORA: 7}
