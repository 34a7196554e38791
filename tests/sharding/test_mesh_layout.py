"""Meshes and rules: how dimensions are sharded, and which settings are refused."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as Spec

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import ParameterAxes
from prompt_tuning.settings.axis_rules import PRESETS, AxisRules
from prompt_tuning.settings.mesh_shape import MeshShape
from prompt_tuning.sharding.mesh import build_mesh
from prompt_tuning.sharding.mesh_layout import partition_spec
from prompt_tuning.sharding.shard_map import check_row_count
from prompt_tuning.training.gradients import gradients
from tests.support import dummies, meshes
from tests.support.exhaustive import sample
from tests.support.refusals import refuses

KERNEL, TABLE, SCALE = ("embed", "mlp"), ("vocab", "embed"), ("embed",)
SPECS = {
    "megatron": (Spec("fsdp", "tensor"), Spec(("fsdp", "tensor"), None), Spec("fsdp")),
    # t5x/partitioning.py, standard_logical_axis_rules: parameter dimensions 1 and 2,
    # activation dimensions 1 and 2; `model` is tensor and `data` fsdp.
    "t5x_1_1": (Spec(None, "tensor"), Spec("tensor", None), Spec(None)),
    "t5x_2_1": (Spec(None, "tensor"), Spec("tensor", None), Spec("tensor")),
    "t5x_1_2": (Spec("fsdp", "tensor"), Spec("tensor", "fsdp"), Spec("fsdp")),
    "t5x_2_2": (Spec("fsdp", "tensor"), Spec("tensor", "fsdp"), Spec("tensor")),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_their_specs(preset):
    rules = AxisRules(preset)
    actual = tuple(
        partition_spec(rules, "a path", names) for names in (KERNEL, TABLE, SCALE)
    )
    assert actual == SPECS[preset]


def test_custom_rules_precede_the_presets():
    rules = AxisRules(rules=[["mlp", None], ["embed", "tensor"]])
    assert partition_spec(rules, "a path", KERNEL) == Spec("tensor", None)
    assert hash(rules) == hash(AxisRules(rules=(("mlp", None), ("embed", "tensor"))))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"preset": "t5"}, "preset is 't5', expected one of 'megatron', 't5x_1_1'"),
        ({"rules": [("width", "fsdp")]}, "the dimension 'width', expected one of"),
        ({"rules": [("embed", "model")]}, "the mesh axis 'model', expected some of da"),
        ({"rules": [("embed", "data")]}, "along which parameters are replicated: use"),
        ({"rules": [("mlp", "fsdp")]}, "maps 'mlp' to fsdp, expected 'tensor' or No"),
        ({"rules": [("vocab", ("fsdp", "fsdp"))]}, "one of them twice"),
        ({"rules": [("embed",)]}, "expected pairs such as"),
    ],
)
def test_invalid_rules_are_refused(rules, message):
    with refuses(message):
        AxisRules(**rules)


def test_an_unavoidable_collision_is_refused():
    rules = AxisRules("t5x_1_1", rules=[("embed", "tensor")])
    with pytest.raises(InputError, match=r"the rule for 'mlp' needs tensor, which ano"):
        partition_spec(rules, "decoder/layers/mlp/up/kernel", KERNEL)


@pytest.mark.parametrize(
    ("shape", "count", "message"),
    [
        (
            {"tensor": 3},
            8,
            r"devices, 8, is not a multiple of 3, so they cannot be arranged",
        ),
        (
            {"data": 2},
            8,
            r"data 2 x fsdp 1 x tensor 1 takes 2 devices, but there are 8",
        ),
        (
            {"data": 16},
            8,
            r"data 16 x fsdp 1 x tensor 1 takes 16 devices, but the",
        ),
        ({"data": 0}, 8, r"MeshShape.data is 0, expected -1 or at least 1"),
        ({"data": -1, "fsdp": -1}, 8, r"-1 for data and fsdp; set all but one of them"),
    ],
)
def test_invalid_meshes_are_refused(shape, count, message):
    with pytest.raises(InputError, match=message):
        build_mesh(MeshShape(**shape), jax.devices()[:count])


def test_minus_one_selects_the_remaining_devices():
    mesh = build_mesh(MeshShape(fsdp=2, tensor=2), jax.devices()[:8])
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("changes", "tensor", "message"),
    [
        (
            {"heads": 6, "key_value_heads": 2},
            4,
            "has 6 heads, which cannot be divided ",
        ),
        ({"feed_forward_width": 30}, 4, "30 feed-forward columns, which cannot be div"),
        ({"heads": 24, "key_value_heads": 3}, 8, "3 key/value heads for 8 devices alo"),
    ],
)
def test_indivisible_models_are_refused(changes, tensor, message):
    config = dataclasses.replace(dummies.LLAMA, **changes)
    with pytest.raises(InputError, match=message):
        meshes.layout_of(MeshShape(data=1, tensor=tensor), config)


def test_an_indivisible_width_is_refused():
    config = dataclasses.replace(dummies.LLAMA, width=15)
    layout = meshes.layout_of(MeshShape(data=1, fsdp=2), config)
    axes = {"final_norm/scale": ParameterAxes(("embed",))}
    shape = {"final_norm/scale": jax.ShapeDtypeStruct((15,), np.float32)}
    with pytest.raises(InputError, match="has 15 numbers along 'embed', which cannot"):
        layout.shardings(axes, shape)


def test_indivisible_rows_are_refused():
    layout = meshes.layout_of(MeshShape(data=2, fsdp=2), dummies.LLAMA)
    check_row_count(layout, 8)
    with pytest.raises(InputError, match="6 rows cannot be divided among 4 devices al"):
        check_row_count(layout, 6)


RULES = {
    "t5x_2_1": AxisRules("t5x_2_1"),
    "t5x_2_2": AxisRules("t5x_2_2"),
    "over two axes": AxisRules(
        rules=[
            *((name, None) for name in ("vocab", "heads", "key_value_heads", "mlp")),
            ("embed", ("fsdp", "tensor")),
        ]
    ),
    "whatever is left": AxisRules(
        rules=[
            ("embed", "tensor"),
            ("vocab", "fsdp"),
            *((name, None) for name in ("heads", "key_value_heads", "mlp")),
        ]
    ),
}


def test_inconsistent_splits_of_an_axis_are_refused():
    rules = [("relative_buckets", "tensor"), ("heads", "tensor"), ("heads", None)]
    rules += [("key_value_heads", "tensor")]
    layout = meshes.layout_of(
        MeshShape(data=1, tensor=2), dummies.T5_GATED, AxisRules(rules=rules)
    )
    with pytest.raises(InputError, match="splits 'heads' over nothing here and"):
        layout.spec("the bias", ("heads", "relative_buckets"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sample(1, RULES))
def test_full_tuning_has_the_same_gradient_with_any_axis_rules(name):
    graph, parameters = dummies.prompted(dummies.LLAMA)
    batch = dummies.make_batch(dummies.LLAMA, dummies.random_rows(meshes.ROWS))
    alone, _ = jax.jit(gradients, static_argnums=0)(graph, parameters, {}, batch, None)
    shape = MeshShape(data=1, fsdp=2, tensor=4)
    layout = meshes.layout_of(shape, dummies.LLAMA, RULES[name])
    placement = meshes.placed(layout, graph, parameters)
    put = {path: placement.put(path, leaf) for path, leaf in parameters.items()}

    @jax.jit
    def on_mesh(put, batch):
        return gradients(graph, put, {}, batch, None, layout=layout)[0]

    replicated = placement.replicate(on_mesh(put, placement.put_batch(batch)))
    for path, leaf in alone.items():
        np.testing.assert_allclose(replicated[path], leaf, atol=2e-5, err_msg=path)


@pytest.mark.parametrize(
    ("heads", "keys", "tensor", "divisor"),
    [(4, 2, 2, None), (4, 2, 4, 2), (4, 1, 4, None), (6, 1, 4, 6)],
)
def test_devices_that_compute_all_heads_of_memories_are_told(
    heads, keys, tensor, divisor
):
    changes = {"recurrent_heads": heads, "recurrent_key_heads": keys}
    config = dataclasses.replace(dummies.QWEN3_5, **changes)
    told = meshes.layout_of(MeshShape(data=2, tensor=tensor), config).whole_memories
    if divisor is None:
        assert told is None
    else:
        assert told is not None
        assert f"each of the {tensor} devices along tensor computes all {heads}" in told
        assert f"a number of devices that divides {divisor} " in told
