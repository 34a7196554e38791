"""Rematerialization: the same numbers with less memory and more products."""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from prompt_tuning.core import parameter_groups
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.recomputation import named, rematerialized
from prompt_tuning.core.rematerialization import (
    BlockRange,
    Rematerialization,
    SavedActivations,
)
from prompt_tuning.losses.objective import LossSums
from prompt_tuning.losses.token_objective import NATS_PER_WEIGHT
from prompt_tuning.models import transformer
from prompt_tuning.models.scoring import loss_sums
from prompt_tuning.settings.mesh_shape import MeshShape
from prompt_tuning.sharding import shard_map
from prompt_tuning.training.gradients import gradients, value_and_gradient
from scripts.bench import hlo
from tests.support import dummies, meshes
from tests.support.exhaustive import sample
from tests.support.refusals import refuses

L = 4
NAMES = ("query", "keys", "values", "attention", "gate", "up")
NOTHING = Rematerialization(policy="nothing")
HOWS = {
    "dots": Rematerialization(policy="dots"),
    "attention": Rematerialization(policy="attention"),
    "names": Rematerialization(policy="names", names=["attention", "up"]),
    "nothing": NOTHING,
    "all but the last two": Rematerialization(policy="dots", skip_last=2),
    "the two in the middle": Rematerialization(
        policy="attention", skip_first=1, skip_last=1
    ),
    "three together, one alone": Rematerialization(policy="nothing", every=3),
    "pairs, and two ranges": Rematerialization(
        policy="dots",
        every=2,
        ranges=[BlockRange(start=0, stop=1), BlockRange(start=1, stop=2, offload=True)],
    ),
}
WRAPPED = {
    "outer offloaded": Rematerialization(offload=True),
    "both": Rematerialization(policy="nothing", offload=True),
    "both, all but first and last": Rematerialization(
        policy="nothing", offload=True, skip_first=1, skip_last=1
    ),
}
ROWS = [(4, 3), (2, 5), (6, 1)]


def deep(config: ModelConfig, how: Rematerialization | None = None) -> ModelConfig:
    """The config with dropout, more blocks and the given rematerialization."""
    return dataclasses.replace(
        dummies.with_dropout(config),
        layers=L,
        encoder_layers=L if config.encoder_layers else 0,
        rematerialization=how or Rematerialization(),
    )


def outcome(config: ModelConfig, regex: str = ".*/prompt/.*", seed: int = 0):
    """Returns sums and gradient of a batch with dropout."""
    graph, parameters = dummies.prompted(config)
    batch = dummies.make_batch(config, dummies.random_rows(ROWS))
    trained, frozen = partitioned(parameters, regex)
    compute = jax.jit(functools.partial(gradients, graph))
    gradient, sums = compute(trained, frozen, batch, jax.random.key(seed))
    return sums, gradient


def partitioned(parameters, regex):
    groups = [
        parameter_groups.ParameterGroup((regex,), parameter_groups.adafactor(0.3))
    ]
    return parameter_groups.partition(
        parameters, parameter_groups.label(parameters, groups)
    )


@functools.cache
def plain(family: str, regex: str = ".*/prompt/.*"):
    """The same with everything saved."""
    return outcome(deep(dummies.FAMILIES[family]), regex)


def assert_same(actual, expected, rounding=2e-6):
    (sums, gradient), (expected_sums, expected_gradient) = actual, expected
    assert float(expected_sums.loss) > 1
    np.testing.assert_allclose(sums.loss, expected_sums.loss, rtol=1e-6)
    for path, want in expected_gradient.items():
        largest = float(np.abs(want).max())
        assert largest > 1e-4, path
        np.testing.assert_allclose(
            gradient[path], want, atol=rounding * largest, err_msg=path
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "family"),
    sample(1, [*((how, "llama") for how in HOWS), ("attention", "t5_gated")]),
)
def test_no_policy_changes_a_number_and_dropout_draws_the_same_masks(how, family):
    assert_same(outcome(deep(dummies.FAMILIES[family], HOWS[how])), plain(family))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("how", "family"),
    sample(1, [*((how, "llama") for how in WRAPPED), ("both", "t5_gated")]),
)
def test_the_wrapper_s_combinations_equal_the_plain_model(how, family):
    assert_same(outcome(deep(dummies.FAMILIES[family], WRAPPED[how])), plain(family))


def test_other_masks_give_another_loss():
    sums, _ = outcome(deep(dummies.LLAMA), seed=1)
    assert abs(float(sums.loss - plain("llama")[0].loss)) > 0.1


@pytest.mark.exhaustive
def test_weight_gradients_are_the_same_in_scans_that_index_layers():
    cut = HOWS["the two in the middle"]
    weights = ".*(prompt/prompt|kernel|scale|embedding)"
    actual = outcome(deep(dummies.T5_GATED, cut), weights)
    # Gradients of weights are sums over all positions.
    assert_same(actual, plain("t5_gated", weights), rounding=4e-6)


@pytest.mark.exhaustive
def test_an_encoder_may_have_its_own_policy():
    config = dataclasses.replace(
        deep(dummies.T5_GATED, Rematerialization(policy="dots", skip_first=1)),
        encoder_rematerialization=NOTHING,
    )
    assert config.encoder_policy == NOTHING
    assert_same(outcome(config), plain("t5_gated"))


@functools.cache
def cost(how: Rematerialization, family: str = "llama") -> tuple[int, int]:
    """FLOPs and temporary bytes of the gradient of a batch of a wider model."""
    config = dataclasses.replace(
        dummies.FAMILIES[family],
        width=32,
        feed_forward_width=88,
        layers=6,
        encoder_layers=6 if dummies.FAMILIES[family].encoder_layers else 0,
        head_width=8,
        maximum_positions=128,
        rematerialization=how,
    )
    graph, parameters = dummies.prompted(config)
    batch = dummies.make_batch(config, dummies.random_rows([(32, 32)] * 8))
    trained, frozen = partitioned(parameters, ".*/prompt/.*")
    compute = jax.jit(lambda t, f, b: gradients(graph, t, f, b, None))
    compiled = compute.lower(trained, frozen, batch).compile()
    memory = cast(Any, compiled.memory_analysis())
    return hlo.matmul_flops(compiled), memory.temp_size_in_bytes


@pytest.mark.slow
def test_kept_values_are_not_recomputed():
    none, saved = cost(Rematerialization())
    again, least = cost(NOTHING)
    # A step runs the same products forward and backward; this runs them forward twice.
    assert 1.3 * none < again < 1.6 * none
    saving: dict[SavedActivations, Sequence[str]] = {
        "dots": (),
        "names": NAMES,
        "attention": (),
    }
    costs = {
        policy: cost(Rematerialization(policy=policy, names=names))
        for policy, names in saving.items()
    }
    flops, sizes = zip(*costs.values(), strict=True)
    assert none < flops[0] < flops[1] < flops[2] <= again
    # The kept products and the named ones are nearly the same arrays.
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)
    for kept in sizes[:2]:
        assert saved > kept > sizes[2] > least


@pytest.mark.exhaustive
def test_excluded_blocks_recompute_no_products():
    none, again = cost(Rematerialization())[0], cost(NOTHING)[0]
    half, _ = cost(Rematerialization(policy="nothing", skip_first=1, skip_last=2))
    assert half - none == pytest.approx((again - none) / 2, rel=0.02)


@pytest.mark.parametrize("family", sample(1, ["llama", "t5_gated"]))
def test_only_a_blocks_input_is_kept(family):
    saved, least = cost(Rematerialization(), family)[1], cost(NOTHING, family)[1]
    assert least < 0.35 * saved


@pytest.mark.parametrize(
    ("how", "saved"),
    [
        (Rematerialization(offload=True), L),
        (Rematerialization(policy="nothing", offload=True, every=2), L // 2),
        # Wraps all blocks and offloads only the two in the middle.
        (
            Rematerialization(
                policy="nothing",
                ranges=[BlockRange(start=1, stop=3, policy="nothing", offload=True)],
            ),
            2,
        ),
    ],
    ids=["each block", "pairs", "a range"],
)
def test_only_inputs_of_blocks_are_offloaded(how, saved):
    config = deep(dummies.LLAMA, how)
    graph, parameters = dummies.prompted(config)
    batch = dummies.make_batch(config, dummies.random_rows(ROWS))
    trained, frozen = partitioned(parameters, ".*/prompt/.*")
    traced = jax.make_jaxpr(lambda t, f, b: gradients(graph, t, f, b, None))(
        trained, frozen, batch
    )
    positions = dummies.P + len(ROWS) * batch.tokens.shape[1]
    # Stacked over the blocks, or segments of blocks, that one loop offloads.
    stacked = re.findall(rf"f32<host>\[(\d+),{positions},{config.width}\]", str(traced))
    assert set(stacked) == {str(saved)}


def test_segments_save_fewer_inputs():
    assert saved_inputs(NOTHING) == 6
    assert saved_inputs(Rematerialization(policy="nothing", every=2)) == 3


@pytest.mark.exhaustive
def test_segments_are_computed_twice():
    alone = cost(NOTHING)[0]
    pairs = cost(Rematerialization(policy="nothing", every=2))[0]
    # The loop over a segment's blocks computes the final product of each again, too.
    positions = dummies.P + 8 * 64
    assert pairs == alone + 6 * (2 * positions * 88 * 32)


def saved_inputs(how: Rematerialization) -> int:
    """Number of stacked inputs of blocks that wait for the backward pass."""
    # No weight has the width of the batch's positions.
    config = dataclasses.replace(
        deep(dummies.LLAMA, how), layers=6, feed_forward_width=20
    )
    graph, parameters = dummies.prompted(config)
    batch = dummies.make_batch(config, dummies.random_rows(ROWS))
    trained, frozen = partitioned(parameters, ".*/prompt/.*")
    text = str(
        jax.make_jaxpr(lambda t, f, b: gradients(graph, t, f, b, None))(
            trained, frozen, batch
        )
    )
    positions = dummies.P + len(ROWS) * batch.tokens.shape[1]
    # A block's input is [24, 16]; inside a segment, fewer are stacked meanwhile.
    counts = re.findall(rf":f32\[(\d+),{positions},{config.width}\]", text)
    return max(map(int, counts))


def gathered_bytes(family: str, how: Rematerialization) -> tuple[int, int]:
    """Temporary bytes of a gradient on a mesh of eight, and the bytes of all blocks."""
    width, base = 64, dummies.FAMILIES[family]
    config = dataclasses.replace(
        base,
        width=width,
        feed_forward_width=4 * width,
        layers=8,
        encoder_layers=8 if base.encoder_layers else 0,
        heads=8,
        key_value_heads=8,
        head_width=8,
        vocabulary_size=32,
        rematerialization=how,
    )
    graph, parameters = dummies.prompted(config)
    layout = meshes.layout_of(MeshShape(data=1, fsdp=8), config)
    placement = meshes.placed(layout, graph, parameters)
    put = {path: placement.put(path, leaf) for path, leaf in parameters.items()}
    trained, frozen = partitioned(put, ".*/prompt/.*")
    zeros = jnp.zeros(())

    def outputs(parameters, batch, key, prefix):
        return loss_sums(graph, parameters, batch, key, NATS_PER_WEIGHT, prefix)

    def on_device(trained, frozen, batch):
        weights = LossSums(jnp.ones(()), zeros, zeros)
        return *value_and_gradient(
            graph, outputs, weights, trained, frozen, batch, None
        ), ()

    batch = dummies.make_batch(config, dummies.random_rows([(4, 3)] * 8))
    compute = jax.jit(
        lambda t, f, b: shard_map.gradient_on_shards(
            layout, graph, on_device, t, f, [b]
        )
    )
    compiled = compute.lower(trained, frozen, placement.put_batch(batch)).compile()
    memory = cast(Any, compiled.memory_analysis())
    blocks = sum(x.nbytes for path, x in parameters.items() if "/layers/" in path)
    return memory.temp_size_in_bytes, blocks


MIDDLE = Rematerialization(policy="attention", skip_first=2, skip_last=2)


@pytest.mark.parametrize(
    ("family", "how"),
    sample(
        1,
        [
            ("llama", Rematerialization()),
            ("llama", HOWS["dots"]),
            ("llama", MIDDLE),
            ("t5_gated", MIDDLE),
        ],
    ),
)
def test_gathered_weights_are_not_kept_for_the_backward_pass(family, how):
    actual, blocks = gathered_bytes(family, how)
    # Two of 8 or 16 blocks at a time, and the activations.
    assert actual < 0.4 * blocks


def test_gathered_weights_of_all_blocks_are_kept_without_separate_gathering(
    monkeypatch,
):
    monkeypatch.setattr(transformer.shard_map, "needs_gather", lambda *_: False)
    actual, blocks = gathered_bytes("llama", Rematerialization())
    assert actual > blocks


class Scaled(nnx.Module):
    """A module whose call takes keywords and returns outputs that are not arrays."""

    def __init__(self):
        self.scale = nnx.Param(jnp.array([2.0, 3.0]))

    def __call__(self, x, *, shift, mode="sine", given=None):
        assert given is None
        y = jnp.sin(x * self.scale[...] + shift) if mode == "sine" else x
        return {"y": y, "mode": mode, "counts": (x.shape[0], None), "half": 0.5}


@pytest.mark.parametrize("policy", ["none", "dots", "attention", "nothing"])
def test_any_module_keeps_its_keywords_and_its_other_outputs(policy):
    module, x = Scaled(), jnp.array([0.1, 0.2])
    call = rematerialized(module, Rematerialization(policy=policy))
    seen = []

    @jax.jit
    def loss(x, shift):
        actual = call(x, shift=shift, mode="sine")
        seen.append({name: actual[name] for name in ("mode", "counts", "half")})
        return actual["y"].sum()

    gradient = jax.grad(loss, argnums=(0, 1))(x, jnp.float32(0.3))
    inner = np.array([2.0, 3.0]) * np.array([0.1, 0.2]) + 0.3
    np.testing.assert_allclose(gradient[0], [2, 3] * np.cos(inner), rtol=1e-6)
    np.testing.assert_allclose(gradient[1], np.cos(inner).sum(), rtol=1e-6)
    assert seen[0] == {"mode": "sine", "counts": (2, None), "half": 0.5}


def test_a_wrapped_function_recomputes_discarded_values():
    def sines(function):
        traced = jax.make_jaxpr(jax.grad(lambda x: function(x)))(1.0)
        return str(traced).count(" sin ")

    def function(x):
        return jnp.sin(named(jnp.sin(x), "first"))

    saving = Rematerialization(policy="names", names=["first"])
    assert sines(rematerialized(function, NOTHING)) > sines(
        rematerialized(function, saving)
    )


@pytest.mark.parametrize("policy", ["none", "nothing"])
def test_a_wrapped_functions_arguments_wait_in_host_memory(policy):
    offloaded = rematerialized(Scaled(), Rematerialization(policy=policy, offload=True))
    x, shift = jnp.array([[0.1, 0.2], [0.3, 0.4]]), np.float32(0.3)

    def loss(x):
        # Doubled, so that the argument is not an input of the program.
        return offloaded(2 * x, shift=shift, mode="sine")["y"].sum()

    inner = np.array([2.0, 3.0]) * 2 * np.asarray(x) + 0.3
    expected = 2 * np.array([2, 3]) * np.cos(inner)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(x), expected, rtol=1e-6)
    _, pull_back = jax.vjp(loss, x)
    # Of the shape of the argument, only its copy in host memory was saved.
    saved = [array for array in jax.tree.leaves(pull_back) if array.shape == x.shape]
    assert [array.sharding.memory_kind for array in saved] == ["pinned_host"]


def test_offloading_without_an_array_to_offload_is_refused():
    call = rematerialized(lambda n: n + 1, Rematerialization(offload=True))
    with pytest.raises(InputError, match="but none was given: pass the activations"):
        call(jnp.array(3))


def test_a_policy_of_jax_is_accepted():
    everything = jax.checkpoint_policies.everything_saveable
    call = rematerialized(jnp.sin, everything)
    np.testing.assert_allclose(jax.grad(call)(0.5), np.cos(0.5), rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policy": "all"}, "policy is 'all', expected one of 'none', 'dots'"),
        ({"policy": "names"}, "names are for policy 'names', which needs some"),
        ({"names": ["up"]}, "names are for policy 'names', which needs some"),
        ({"policy": "names", "names": "up"}, "expected a list of strings"),
        ({"policy": "dots", "skip_last": -1}, "skip_last is -1, expected at least 0"),
        ({"skip_first": 2}, "its policy is 'none' and nothing is offloaded"),
        ({"every": 2}, "every is 2, but its policy is 'none'"),
        ({"policy": "dots", "every": 0}, "every is 0, expected at least 1"),
        (
            {"ranges": [BlockRange(start=2, stop=4), BlockRange(start=1, stop=3)]},
            "expected a start of at least 4 and a larger stop",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(fields, message):
    with refuses(message):
        Rematerialization(**fields)


def test_excluding_all_blocks_is_refused():
    how = Rematerialization(policy="nothing", skip_first=2, skip_last=2)
    with pytest.raises(InputError, match="2 \\+ 2 blocks of a decoder that has 4"):
        deep(dummies.LLAMA, how)


def test_a_range_of_other_blocks_is_refused():
    how = Rematerialization(ranges=[BlockRange(start=2, stop=5)])
    with pytest.raises(InputError, match="2 to 5 of a decoder whose blocks 0 to 4"):
        deep(dummies.LLAMA, how)


def test_an_unknown_block_name_is_refused_with_the_known_names():
    how = Rematerialization(policy="names", names=["gate"])
    with pytest.raises(InputError, match="'gate', but the blocks name attention, "):
        outcome(deep(dummies.GPT2, how))
