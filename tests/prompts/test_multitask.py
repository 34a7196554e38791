# PEFT and transformers are in the `bench` extra only.
# pyright: reportMissingImports=false

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import logical_axes, merge, split
from prompt_tuning.prompts.factorized import (
    FactorizedMultiTaskPrompt,
    factors_of_ones,
    normal_factors,
)
from prompt_tuning.prompts.initializers import (
    Vocabulary,
    from_array,
    from_sampled_vocabulary,
    uniform,
)
from prompt_tuning.prompts.multitask import (
    AddMultiTaskPrompt,
    ConcatFeaturesMultiTaskPrompt,
    ConcatTimeMultiTaskPrompt,
    ProjectMultiTaskPrompt,
)

N, P, D = 3, 4, 6
KEY = jax.random.key(0)
TABLE = np.random.default_rng(0).standard_normal((9, D)).astype("f4")
VOCABULARY = Vocabulary(TABLE)
ADD = functools.partial(AddMultiTaskPrompt, length=P, tasks=N)
TIME = functools.partial(ConcatTimeMultiTaskPrompt, length=P, tasks=N)
FEATURES = functools.partial(
    ConcatFeaturesMultiTaskPrompt,
    length=P,
    tasks=N,
    shared_features=2,
    task_features=4,
)
PROJECT = functools.partial(
    ProjectMultiTaskPrompt, length=P, tasks=N, shared_features=2
)
FACTORIZED = functools.partial(FactorizedMultiTaskPrompt, length=P, tasks=N, rank=2)
KINDS = {
    "add": (ADD, {"shared": (P, D), "task": (N, P, D)}),
    "concat_time": (TIME, {"shared": (P, D), "task": (N, P, D)}),
    "concat_features": (FEATURES, {"shared": (P, 2), "task": (N, P, 4)}),
    "project": (PROJECT, {"shared": (P, 2), "task": (N, D * 2 + D)}),
    "factorized": (
        FACTORIZED,
        {"shared": (P, D), "columns": (N, P, 2), "rows": (N, 2, D)},
    ),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def numbered(factory):
    """Fills a prompt with distinct numbers, and evaluates it under `jit`."""
    graph, parameters = split(factory(KEY, VOCABULARY))
    random = np.random.default_rng(1)
    numbers = {
        path: random.standard_normal(leaf.shape).astype("f4")
        for path, leaf in parameters.items()
    }
    evaluate = jax.jit(lambda parameters: merge(graph, parameters)())
    return numbers, np.asarray(evaluate(numbers))


@every_kind
def test_a_prompt_for_each_task_from_parameters_with_named_axes(kind):
    factory, shapes = KINDS[kind]
    prompt = factory(KEY, VOCABULARY)
    _, parameters = split(prompt)
    assert {path: leaf.shape for path, leaf in parameters.items()} == shapes
    assert {leaf.dtype for leaf in parameters.values()} == {jnp.dtype("float32")}
    axes = logical_axes(prompt)
    assert {path: len(axes[path].names) for path in shapes} == {
        path: len(shape) for path, shape in shapes.items()
    }
    assert all(x.names[0] == "tasks" for p, x in axes.items() if p != "shared")
    assert prompt.count == N
    assert prompt().shape == (N, prompt.length, D)
    assert prompt.real_length == prompt.length == (2 * P if factory is TIME else P)


def test_added_prompts():
    numbers, vectors = numbered(ADD)
    for task in range(N):
        expected = numbers["shared"] + numbers["task"][task]
        np.testing.assert_allclose(vectors[task], expected, rtol=1e-6)


def test_shared_vectors_precede_the_tasks():
    numbers, vectors = numbered(functools.partial(TIME, task_length=2))
    assert vectors.shape == (N, P + 2, D)
    for task in range(N):
        np.testing.assert_array_equal(vectors[task, :P], numbers["shared"])
        np.testing.assert_array_equal(vectors[task, P:], numbers["task"][task])


def test_shared_features_precede_the_tasks():
    numbers, vectors = numbered(FEATURES)
    for task in range(N):
        np.testing.assert_array_equal(vectors[task, :, :2], numbers["shared"])
        np.testing.assert_array_equal(vectors[task, :, 2:], numbers["task"][task])


def test_projected_prompts_have_a_flattened_kernel_and_then_a_bias():
    numbers, vectors = numbered(PROJECT)
    for task in range(N):
        row = numbers["task"][task]
        for p in range(P):
            expected = [
                row[2 * d] * numbers["shared"][p, 0]
                + row[2 * d + 1] * numbers["shared"][p, 1]
                + row[2 * D + d]
                for d in range(D)
            ]
            np.testing.assert_allclose(vectors[task, p], expected, rtol=1e-4, atol=1e-6)


def test_factorized_prompts():
    numbers, vectors = numbered(FACTORIZED)
    for task in range(N):
        factor = numbers["columns"][task] @ numbers["rows"][task]
        expected = numbers["shared"] * factor
        np.testing.assert_allclose(vectors[task], expected, rtol=1e-4, atol=1e-6)


def test_factorized_prompts_start_at_the_shared_one():
    start = from_array(TABLE[:P])
    prompt = FACTORIZED(KEY, VOCABULARY, initializer=start)
    for task in prompt():
        np.testing.assert_allclose(task, TABLE[:P], rtol=1e-6)
    columns, rows = factors_of_ones()(KEY, (N, P, 2, D))
    # The second rank must not be 0 everywhere, or it would never have a gradient.
    assert np.abs(columns[..., 1]).min() > 0 and not rows[:, 1].any()


def test_factors_as_in_peft_start_near_zero():
    columns, rows = normal_factors()(KEY, (8, 100, 16, 100))
    assert np.std(columns) == pytest.approx(0.02, rel=0.05)
    assert np.std(rows) == pytest.approx(0.02, rel=0.05)
    assert np.std(columns @ rows) == pytest.approx(16**0.5 * 0.02**2, rel=0.05)


@every_kind
def test_tasks_have_different_initial_values_unless_they_start_at_the_shared_prompt(
    kind,
):
    first, second, _ = KINDS[kind][0](KEY, VOCABULARY)()
    assert np.array_equal(first, second) == (kind == "factorized")


def test_each_task_may_start_in_the_vocabulary():
    prompt = ADD(
        KEY,
        VOCABULARY,
        initializer=from_array(np.zeros((P, D), "f4")),
        task_initializer=from_sampled_vocabulary(None),
    )
    rows = {tuple(row) for row in TABLE}
    assert all(tuple(row) in rows for task in np.asarray(prompt()) for row in task)


def test_the_maps_have_an_initializer():
    prompt = PROJECT(KEY, VOCABULARY, task_initializer=uniform(0.5))
    task = np.asarray(prompt.task[...])
    assert task.min() >= 0 and 0.3 < task.max() < 0.5
    default = np.asarray(PROJECT(KEY, VOCABULARY).task[...])
    assert default[:, : 2 * D].all() and not default[:, 2 * D :].any()


@pytest.mark.parametrize(
    ("factory", "choices", "message"),
    [
        (ADD, {"tasks": 0}, "tasks is 0, expected at least 1"),
        (PROJECT, {"tasks": 0}, "tasks is 0, expected at least 1"),
        (FACTORIZED, {"tasks": -1}, "tasks is -1, expected at least 1"),
        (ADD, {"length": 0}, "length is 0, expected at least 1"),
        (TIME, {"task_length": 0}, "length is 0, expected at least 1"),
        (FEATURES, {"shared_features": 3}, "3 and task_features 4 .* add up to 6"),
        (FEATURES, {"shared_features": 6, "task_features": 0}, "must be positive"),
        (PROJECT, {"shared_features": 0}, "shared_features is 0"),
        (FACTORIZED, {"rank": 0}, "rank is 0, expected at least 1"),
        (
            FEATURES,
            {"initializer": from_sampled_vocabulary(None)},
            r"returned \(4, 6\), expected \(4, 2\)",
        ),
    ],
)
def test_unsupported_multi_task_prompts_are_refused(factory, choices, message):
    with pytest.raises(InputError, match=message):
        factory(KEY, VOCABULARY, **choices)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")  # of transformers
def test_factorized_prompts_equal_pefts():
    import torch
    from peft import MultitaskPromptTuningConfig
    from peft.tuners.multitask_prompt_tuning import MultitaskPromptEmbedding

    numbers, vectors = numbered(FACTORIZED)
    given = {name: torch.tensor(np.array(x)) for name, x in numbers.items()}
    tasks, length, rank = given["columns"].shape
    config = MultitaskPromptTuningConfig(
        task_type="CAUSAL_LM",
        num_tasks=tasks,
        num_ranks=rank,
        num_virtual_tokens=length,
        token_dim=given["shared"].shape[1],
        num_transformer_submodules=1,
    )
    module = MultitaskPromptEmbedding(config, None)
    with torch.no_grad():
        module.embedding.weight.copy_(given["shared"])
        module.prefix_task_cols.copy_(given["columns"])
        module.prefix_task_rows.copy_(given["rows"])
        ids, indices = torch.arange(tasks), torch.arange(length).expand(tasks, length)
        expected = module(indices, ids).numpy()
    np.testing.assert_allclose(vectors, expected, rtol=1e-5, atol=1e-6)
