from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prompt_tuning.core import learning_rates, parameter_groups
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameter_groups import ParameterGroup

ADAMW = parameter_groups.adamw()


@pytest.mark.parametrize(
    ("path", "matched"),
    [
        ("encoder/prompt/prompt", True),
        ("decoder/prompt/prompt", True),
        ("prompt/prompt", False),
        ("encoder/prompt", False),
        ("encoder/prompt/", True),
        ("encoder/prompts/prompt", False),
    ],
)
def test_an_expression_must_match_the_whole_path(path, matched):
    assert parameter_groups.match_any([r"nothing", r".*/prompt/.*"])(path) is matched


def test_an_empty_list_of_expressions_matches_nothing():
    assert not parameter_groups.match_any([])("encoder/prompt/prompt")


def test_invalid_expressions_are_refused():
    with pytest.raises(InputError, match=r"'\*/prompt', which is not a regular"):
        parameter_groups.match_any(["*/prompt"])


def test_paths_have_their_groups_number_and_frozen_ones_none():
    groups = [
        ParameterGroup((r".*/prompt/.*",), ADAMW),
        ParameterGroup((r"head/kernel", r".*/scale"), ADAMW),
    ]
    paths = ["a/prompt/prompt", "head/kernel", "a/norm/scale", "a/norm/bias"]
    labels = parameter_groups.label(paths, groups)
    assert labels == {"a/prompt/prompt": 0, "head/kernel": 1, "a/norm/scale": 1}


def test_a_multitask_expression_without_a_match_is_an_error():
    # google-research/prompt-tuning ships this expression. Nothing follows the name in
    # the path, so its shared prompt was neither trained nor saved, without an error.
    paths = [
        "encoder/prompt/prompt/shared_prompt",
        "encoder/prompt/prompt/task_prompts/embedding",
        "encoder/layers/mlp/up/kernel",
        "token_embedder/embedding",
    ]
    groups = [ParameterGroup((r".*/shared_prompt/.*", r".*/task_prompts/.*"), ADAMW)]
    with pytest.raises(InputError, match="matches no parameter") as error:
        parameter_groups.label(paths, groups)
    message = str(error.value)
    assert "'.*/shared_prompt/.*'" in message
    nearest = message.partition("paths are ")[2].split(", ")
    assert nearest[0] == "encoder/prompt/prompt/shared_prompt"


def test_a_parameter_in_two_groups_is_an_error():
    groups = [
        ParameterGroup((r".*/prompt/.*",), ADAMW),
        ParameterGroup((r"encoder/.*",), ADAMW),
    ]
    with pytest.raises(InputError, match=r"encoder/prompt/prompt is in two groups"):
        parameter_groups.label(["encoder/prompt/prompt", "head/kernel"], groups)


def test_two_expressions_of_one_group_may_match_one_path():
    groups = [ParameterGroup((r".*/prompt/.*", r"a/.*"), ADAMW)]
    assert parameter_groups.label(["a/prompt/prompt"], groups) == {"a/prompt/prompt": 0}


def test_no_groups_are_an_error():
    with pytest.raises(InputError, match="nothing would be trained"):
        parameter_groups.label(["a/prompt/prompt"], [])


def updated(groups, parameters, gradient):
    """Returns the trained parameters after one step, and the optimizer state."""
    labels = parameter_groups.label(parameters, groups)
    trained, frozen = parameter_groups.partition(parameters, labels)
    assert trained | frozen == parameters and not trained.keys() & frozen.keys()
    optimizer = parameter_groups.group_optimizer(groups, labels)

    @jax.jit
    def step(trained, gradient):
        updates, state = optimizer.update(gradient, optimizer.init(trained), trained)
        return optax.apply_updates(trained, updates), state

    return step(trained, {path: gradient[path] for path in trained})


def test_each_group_uses_its_own_optimizer_and_frozen_leaves_have_no_state():
    parameters = {path: np.ones((2, 3), np.float32) for path in ("a/x", "b/x", "c/x")}
    groups = [
        ParameterGroup((r"a/.*",), optax.sgd(1.0)),
        ParameterGroup((r"b/.*",), optax.sgd(0.5, momentum=0.9)),
    ]
    trained, state = updated(groups, parameters, parameters)
    np.testing.assert_allclose(trained["a/x"], 0.0)
    np.testing.assert_allclose(trained["b/x"], 0.5)
    assert trained.keys() == {"a/x", "b/x"}
    # One momentum, for b/x only.
    assert [leaf.shape for leaf in jax.tree.leaves(state)] == [(2, 3)]


def test_adafactors_first_step_is_the_sign_and_then_the_decay():
    random = np.random.default_rng(0)
    prompt = random.standard_normal((5, 8)).astype(np.float32)
    gradient = random.standard_normal((5, 8)).astype(np.float32)
    groups = [ParameterGroup((r".*",), parameter_groups.adafactor(0.3))]
    trained, _ = updated(groups, {"p": prompt}, {"p": gradient})
    expected = prompt - 0.3 * np.sign(gradient) - 1e-5 * prompt
    np.testing.assert_allclose(trained["p"], expected, rtol=1e-5, atol=1e-6)


def test_adafactors_decay_does_not_depend_on_the_learning_rate():
    prompt = np.full((5, 8), 1000.0, np.float32)
    groups = [ParameterGroup((r".*",), parameter_groups.adafactor(1e-9))]
    trained, _ = updated(groups, {"p": prompt}, {"p": np.ones_like(prompt)})
    np.testing.assert_allclose(prompt - trained["p"], 1000 * 1e-5, rtol=1e-2)


def test_adamw_clips_the_norm_of_its_group():
    gradient = {"a": np.full(4, 10.0, np.float32), "b": np.full(4, 1e6, np.float32)}
    parameters = {path: np.zeros(4, np.float32) for path in gradient}
    clipped = parameter_groups.adamw(1.0, clip_norm=2.0)
    groups = [ParameterGroup(("a",), clipped), ParameterGroup(("b",), optax.sgd(0.0))]
    _, state = updated(groups, parameters, gradient)
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (4,)]
    # The first moment is a tenth of the clipped gradient; unclipped, its norm was 20.
    np.testing.assert_allclose(moments[0], 0.1, rtol=1e-5)


def test_adamw_decays_in_proportion_to_the_learning_rate():
    parameters = {"p": np.full(3, 10.0, np.float32)}
    groups = [ParameterGroup(("p",), parameter_groups.adamw(0.01, weight_decay=0.5))]
    trained, _ = updated(groups, parameters, {"p": np.zeros(3, np.float32)})
    np.testing.assert_allclose(trained["p"], 10 - 0.01 * 0.5 * 10, rtol=1e-6)


def test_the_schedule_rises_to_its_peak_and_decays_to_a_fraction_of_it():
    schedule = learning_rates.warmup_linear_decay(
        0.3, 110, warmup_steps=10, final_fraction=0.05
    )
    rates = jax.jit(jax.vmap(schedule))(jnp.array([0, 5, 10, 60, 110, 200]))
    middle = (0.3 + 0.015) / 2
    expected = [0.03, 0.165, 0.3, middle, 0.015, 0.015]
    np.testing.assert_allclose(rates, expected, rtol=1e-5)


def test_a_schedule_may_begin_at_its_peak():
    schedule = learning_rates.warmup_linear_decay(0.3, 10, warmup_steps=0)
    assert schedule(0) == pytest.approx(0.3)


def test_a_warmup_as_long_as_the_run_takes_half_of_it():
    with pytest.warns(UserWarning, match="takes 5 instead of 10"):
        schedule = learning_rates.warmup_linear_decay(0.3, 10, warmup_steps=10)
    rates = np.array([schedule(step) for step in range(6)])
    assert (np.diff(rates) > 0).all()
    assert rates[5] == pytest.approx(0.3)


def test_each_expression_of_a_setting_must_match_a_path():
    paths = ["decoder/prompt/prompt", "decoder/final_norm/scale"]
    parameter_groups.check_matches([".*/scale", ".*/prompt"], paths, "Run.save_paths")
    with pytest.raises(InputError, match=r"Run\.save_paths: .*'scale' matches no"):
        parameter_groups.check_matches([".*/scale", "scale"], paths, "Run.save_paths")


def test_lora_plus_is_two_learning_rates():
    paths = [f"query/adapters/lora/{leaf}" for leaf in ("a", "b", "magnitude")]
    parameters = {path: jnp.full(3, 2.0) for path in paths}
    gradients = {path: jnp.arange(1.0, 4.0) for path in paths}

    def updates(groups) -> Any:
        optimizer = parameter_groups.group_optimizer(
            groups, parameter_groups.label(parameters, groups)
        )
        return optimizer.update(gradients, optimizer.init(parameters), parameters)[0]

    one = ParameterGroup([".*"], parameter_groups.adamw(0.01, 0.1), lora_plus_ratio=16)
    first = ParameterGroup([".*/a"], parameter_groups.adamw(0.01, 0.1))
    second = ParameterGroup([".*/(b|magnitude)"], parameter_groups.adamw(0.16, 0.1))
    expected = updates([first, second])
    for path, update in updates([one]).items():
        np.testing.assert_allclose(update, expected[path], rtol=1e-6)


def test_a_lora_plus_ratio_needs_a_lora():
    group = ParameterGroup([".*"], parameter_groups.adamw(), lora_plus_ratio=16)
    with pytest.raises(InputError, match=r"lora_plus_ratio is 16, but .* no LoRA"):
        parameter_groups.label(["decoder/prompt/prompt"], [group])
    with pytest.raises(InputError, match="lora_plus_ratio is 0, expected"):
        ParameterGroup([".*"], parameter_groups.adamw(), lora_plus_ratio=0)
