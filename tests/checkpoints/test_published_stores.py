"""Folders of quantized weights, held as they are published."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from prompt_tuning.adapters.merge import write_merged
from prompt_tuning.checkpoints.published_kernel import PublishedKernel, published_stores
from prompt_tuning.checkpoints.stored_tensors import FusedPart, layered
from prompt_tuning.core import parameter_groups
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import stored_kernel
from prompt_tuning.core.quantization.nibbles import NORMAL_FLOAT, pack
from prompt_tuning.core.quantization.product import as_float32, multiply
from prompt_tuning.core.quantization.stores import PARTS, part_path
from prompt_tuning.core.quantization.tables import wide_table
from prompt_tuning.decoding.decoding_engine import DecodingEngine
from prompt_tuning.decoding.request import Request
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.models.scoring import token_losses
from prompt_tuning.pretrained.frozen_fingerprint import fingerprint
from prompt_tuning.pretrained.prompted_model import PromptedModel, open_pretrained
from prompt_tuning.pretrained.tuning import Tuning
from prompt_tuning.prompts.low_rank_adapters import LoRA
from prompt_tuning.prompts.soft import SoftPrompt
from prompt_tuning.settings.mesh_shape import MeshShape
from prompt_tuning.settings.pretrained import Pretrained, WeightLocation
from prompt_tuning.training.gradients import gradients
from scripts.random_model import write_random_model
from tests.support import dummies
from tests.support.exhaustive import sample
from tests.support.quantized_folders import KINDS, write_quantized

CONFIG = dataclasses.replace(
    dummies.LLAMA, width=128, feed_forward_width=192, head_width=32
)
DOWN = "decoder/layers/mlp/down/kernel"
HEAD = "head/kernel"
NAME = "model.layers.1.mlp.down_proj."
STORES = {
    "nf4": "nf4 in groups of 64",
    # Groups of 128 inputs share two scales, and of 192 in blocks of 16,384 one.
    "nf4 nested": "nf4 in groups of 64 with nested scales",
    "int8": "int8",
    "gptq": "int4 in groups of 32 with zero points",
    "gptq 8": "int8 in groups of 32 with zero points",
    "awq": "int4 in groups of 32 with zero points",
    "pack int4": "int4 in groups of 32",
    # Of 128 inputs one, and of 192 in blocks of 128 three.
    "fp8": "float8_e4m3fn in groups of 64",
}
PART = FusedPart(1, (3, 1), in_first=False)
"""The last quarter of the outputs."""
TUNED = Tuning(
    prompt=functools.partial(SoftPrompt, length=3),
    adapters=[LoRA(rank=2, regexes=[".*"])],
)
WIDE = "float32"
widened = jax.jit(jax.vmap(cast(Any, as_float32)))
"""Returns the weights of all layers from any store."""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_random_model(folder, CONFIG)
    return folder


@pytest.fixture(scope="module")
def folders(base, tmp_path_factory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("quantized")
    return {kind: write_quantized(base, parent / kind, kind) for kind in KINDS}


@pytest.fixture
def folder(base, tmp_path):
    return functools.partial(write_quantized, base, tmp_path / "model")


def opened(
    folder: Path,
    dtype: str | None = None,
    tuning: Tuning | None = None,
    mesh: MeshShape | None = None,
    weights: WeightLocation = "device",
) -> PromptedModel:
    source = Pretrained(checkpoint=str(folder), parameter_dtype=dtype, weights=weights)
    return open_pretrained(source, tuning, key=jax.random.key(0), mesh=mesh)


def change(folder: Path, **tensors: np.ndarray | None) -> None:
    """Replaces tensors of one module of a folder."""
    file = folder / "model.safetensors"
    stored = load_file(file) | {f"{NAME}{name}": x for name, x in tensors.items()}
    save_file({name: x for name, x in stored.items() if x is not None}, file)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_stand_for_the_published_weights(kind, folders):
    held = opened(folders[kind])
    parameters, stored = held.plan.restore(), held.plan.stored
    for path in held.plan.quantized:
        names = held.plan.restored[path].sources
        wide = np.stack([stored[name].read().T for name in names])
        parts = [parameters.get(part_path(path, part)) for part in PARTS]
        meant = widened(*stored_kernel(parameters[path], *parts))
        rounding = 1e-6 if kind == "nf4 nested" else 0
        np.testing.assert_allclose(meant, wide, rtol=rounding)
    for path, array in parameters.items():
        if kind == "nf4 nested" and path.endswith("kernel_scale"):
            assert array.dtype == np.uint8
    assert str(held.plan.stores[DOWN]) == STORES[kind]
    report = held.plan.report()
    assert "as published: " in report and STORES[kind] in report
    assert "widened" not in report
    bits = 8 if kind in ("int8", "gptq 8", "fp8") else 4
    assert parameters[DOWN].nbytes == CONFIG.layers * 192 * 128 * bits // 8
    unquantized = {path for path in parameters if path.endswith(("norm/scale", "ding"))}
    assert {parameters[path].dtype.name for path in unquantized} == {"bfloat16"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sample(2, KINDS))
def test_gradients_equal_those_of_the_widened_weights(kind, folders):
    """Of a prompt, and of LoRA at every projection."""
    batch = dummies.make_batch(CONFIG, dummies.random_rows([(4, 3), (2, 5)]))
    groups = [
        parameter_groups.ParameterGroup(
            [".*/prompt/.*", ".*/adapters/.*"], parameter_groups.adamw()
        )
    ]
    outcomes = []
    for dtype in (None, WIDE):
        model = opened(folders[kind], dtype, TUNED)
        parameters = model.read_parameters()
        for path in parameters:
            if path.endswith("lora/b"):  # it is 0, and so is the gradient of a
                parameters[path] = parameters[path] + 0.01
        labels = parameter_groups.label(parameters, groups)
        parts = parameter_groups.partition(parameters, labels)
        run = jax.jit(functools.partial(gradients, model.graph, key=None))
        outcomes.append(run(*parts, batch))
    (gradient, sums), (same_gradient, same_sums) = outcomes
    assert float(sums.loss) == pytest.approx(float(same_sums.loss), rel=1e-5)
    for path, leaf in same_gradient.items():
        scale = np.abs(leaf).max()
        assert scale > 0
        np.testing.assert_allclose(gradient[path], leaf, atol=1e-5 * max(scale, 1))


WITH_HEAD = dataclasses.replace(CONFIG, vocabulary_size=64)


@pytest.fixture
def with_head(tmp_path):
    """Returns models with the codes of a folder's head, and with wide weights."""

    def pair(kind):
        write_random_model(tmp_path / "base", WITH_HEAD)
        folder = write_quantized(tmp_path / "base", tmp_path / "model", kind, "lm_head")
        models = opened(folder), opened(folder, WIDE)
        return [(model, model.read_parameters()) for model in models]

    return pair


TWO = ("gptq", "nf4")
CONTINUED = sample(2, [*TWO, *(kind for kind in KINDS if kind not in TWO)])
# One program for the wide models of all kinds.
losses_of = jax.jit(token_losses, static_argnums=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_head_stays_in_its_codes(kind, with_head):
    (held, codes), (wide, numbers) = with_head(kind)
    assert held.plan.stores[HEAD].quantized
    np.testing.assert_array_equal(wide_table(codes, HEAD), numbers[HEAD])
    batch = dummies.make_batch(WITH_HEAD, dummies.random_rows([(4, 3), (2, 5)]))
    losses = losses_of(held.graph, codes, batch).nll
    expected = losses_of(wide.graph, numbers, batch).nll
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONTINUED)
def test_a_quantized_head_continues_texts_as_the_wide_one(kind, with_head):
    ids = []
    for model, each in with_head(kind):
        engine = DecodingEngine(model, each, slots=2, length=32)
        request = Request(ids=[3, 5, 7], sampling=Sampling(new_tokens=12))
        (handle,) = engine.run([request])
        ids.append(handle.completions[0].ids)
    assert ids[0] == ids[1]


@pytest.mark.slow
def test_no_step_has_the_wide_nested_scales_of_all_layers(folders):
    # Without LoRA of rank 2, which has the same shape.
    model = opened(folders["nf4 nested"], tuning=Tuning(prompt=TUNED.prompt))
    parameters = model.plan.abstract
    labels = {path: 0 for path in parameters if "/prompt/" in path}
    parts = parameter_groups.partition(dict(parameters), labels)
    batch = dummies.make_batch(CONFIG, dummies.random_rows([(4, 3), (2, 5)]))
    run = jax.jit(functools.partial(gradients, model.graph, key=None))
    text = run.lower(*parts, batch).compile().as_text()
    assert text is not None and "u8[2,2,192]" in text
    assert "f32[2,2,192]" not in text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gptq", "fp8"])
def test_layers_and_shards_equal_the_whole(kind, folders):
    whole = opened(folders[kind]).plan.restore()
    streamed = opened(folders[kind], weights="streamed").weight_storage.streamed
    for path, weight in streamed.items():
        np.testing.assert_array_equal(weight.read(1), whole[path][1])
    mesh = MeshShape(data=4, fsdp=2)
    for path, array in opened(folders[kind], mesh=mesh).read_parameters().items():
        for shard in array.addressable_shards:
            expected = np.zeros(array.shape, array.dtype)
            inside = tuple(map(slice, whole[path].shape))
            expected[inside] = whole[path]
            np.testing.assert_array_equal(shard.data, expected[shard.index])


@pytest.mark.slow
def test_only_a_mesh_that_divides_weights_widens_nested_scales(folders):
    meshes = (None, MeshShape(), MeshShape(fsdp=2))
    models = [opened(folders["nf4 nested"], mesh=mesh) for mesh in meshes]
    assert [model.plan.stores[DOWN].nested for model in models] == [1, 1, None]
    # A run continues on either.
    found = {fingerprint(x.read_parameters(), x.placement) for x in models}
    streamed = opened(folders["nf4 nested"], weights="streamed")
    parts = streamed.weight_storage.with_streamed(streamed.read_parameters())
    assert found == {fingerprint(parts)}


def test_a_mesh_that_would_divide_a_group_is_refused(folders):
    """The outputs of a block have 128 inputs, and those of its MLP 192."""
    with pytest.raises(
        InputError, match=r"down/kernel_scale has 3 groups .*'mlp'.* 2 dev"
    ):
        opened(folders["nf4"], mesh=MeshShape(data=4, tensor=2))
    opened(folders["gptq"], mesh=MeshShape(data=4, tensor=2)).read_parameters()


def test_a_given_type_wins_but_rounds_nothing_twice(folders):
    published = opened(folders["gptq"]).plan.restore()
    same = opened(folders["gptq"], "int4").plan.restore()
    assert f"{DOWN}_zero" in published
    np.testing.assert_array_equal(same[DOWN], published[DOWN])
    other = opened(folders["gptq"], "nf4")
    assert not other.plan.stores
    assert f"{DOWN}_codebook" in other.plan.restore()


@pytest.mark.parametrize(
    ("dtype", "group", "message"),
    [
        (None, 32, "only weights that are packed when they are read"),
        ("int8", 32, "only weights that are packed when they are read"),
        ("nf4", 48, "is 48, expected a power of two from 4"),
    ],
)
def test_groups_of_another_size_are_for_packed_weights(dtype, group, message):
    with pytest.raises(InputError, match=message):
        Pretrained(checkpoint=".", parameter_dtype=dtype, quantization_group=group)


def test_the_size_of_groups_is_chosen_where_it_divides_the_inputs(base):
    source = Pretrained(
        checkpoint=str(base), parameter_dtype="int4", quantization_group=128
    )
    held = open_pretrained(source, key=jax.random.key(0)).plan.restore()
    wide = opened(base).plan.restore()
    for path, size in {DOWN: 64, DOWN.replace("down", "up"): 128}.items():
        kernel, scale = pack(wide[path], None, size)
        np.testing.assert_array_equal(held[path], kernel)
        np.testing.assert_array_equal(held[part_path(path, "scale")], scale)


def test_nothing_is_merged_into_quantized_weights(folders, tmp_path):
    with pytest.raises(InputError, match="merge into the model that was quantized"):
        write_merged(tmp_path / "merged", folders["nf4"], [])


def test_nf4_rounds_to_itself():
    """Its largest weight makes the scale, and is 1 or -1 times it.

    So dequantized NF4 in the same groups may be packed again without a change.
    """
    weights = np.random.default_rng(0).standard_normal((512, 300), np.float32)
    codes, scale = pack(weights, NORMAL_FLOAT)
    grouped = codes.reshape(8, 32, 300)
    indices = np.concatenate([grouped & 15, grouped >> 4], axis=1)
    wide = (NORMAL_FLOAT[indices] * scale[:, None]).reshape(512, 300)
    again, same_scale = pack(wide, NORMAL_FLOAT)
    np.testing.assert_array_equal(again, codes)
    np.testing.assert_array_equal(same_scale, scale)


def test_fused_projections_are_divided_by_output(folders):
    """As Phi-3 stores query, key and value: as the outputs of one tensor."""
    recipe = layered("model.layers.{}.mlp.down_proj.weight", CONFIG.layers, PART)
    stored = opened(folders["gptq"]).plan.stored
    store = published_stores({DOWN: recipe}, stored)[DOWN]
    kernel = PublishedKernel(DOWN, (2, 192, 32), recipe, stored, store)
    whole = opened(folders["gptq"]).plan.restore()
    for read, path in (
        (kernel.read, DOWN),
        (functools.partial(kernel.read_part, "scale"), part_path(DOWN, "scale")),
        (functools.partial(kernel.read_part, "zero"), part_path(DOWN, "zero")),
    ):
        part = (slice(0, 2), slice(1, 5), slice(3, 20))
        (array,) = read([part])
        np.testing.assert_array_equal(array, whole[path][:, 1:5, 96 + 3 : 96 + 20])


def test_inputs_in_another_order_than_their_groups_are_reordered(folder):
    """As GPTQ quantizes them in the order of activations (desc_act)."""
    model = folder("gptq")
    groups = np.random.default_rng(0).permutation(192) // 32
    change(model, g_idx=groups.astype(np.int32))  # of the second layer
    held = opened(model)
    assert str(held.plan.stores[DOWN]).endswith("with zero points, reordered")
    parameters = held.plan.restore()
    names = ("scale", "codebook", "zero")
    others = [parameters.get(part_path(DOWN, name)) for name in names]
    order = parameters[part_path(DOWN, "order")]
    np.testing.assert_array_equal(order[0], np.arange(192))
    meant = widened(parameters[DOWN], *others, order)
    wide = held.plan.stored[f"{NAME}weight"].read().T
    np.testing.assert_array_equal(meant[1], wide)
    x = np.random.default_rng(0).standard_normal((5, 192), np.float32)
    parts = [None if part is None else jnp.asarray(part[1]) for part in others]
    product = cast(Any, multiply)(
        jnp.asarray(x), jnp.asarray(parameters[DOWN][1]), *parts, jnp.asarray(order[1])
    )
    np.testing.assert_allclose(product, x @ wide, atol=1e-4)
    whole = parameters[DOWN][:, :40]
    read = dict(held.plan.readers())[DOWN]
    np.testing.assert_array_equal(read([np.s_[0:2, 0:40, 0:128]])[0], whole)
    with pytest.raises(InputError, match="groups that do not follow each other"):
        opened(model, mesh=MeshShape(data=4, tensor=2))
    groups[groups == 5] = 4
    change(model, g_idx=groups.astype(np.int32))
    assert str(opened(model).plan.stores[DOWN]) == "bfloat16"


def test_a_stack_with_a_layer_in_another_type_is_widened(folder):
    model = folder("pack int4")
    weight = np.random.default_rng(0).standard_normal((128, 192), np.float32)
    gone = dict.fromkeys(("weight_packed", "weight_scale", "weight_shape"))
    change(model, weight=weight, **gone)
    plan = opened(model).plan
    assert str(plan.stores[DOWN]) == "bfloat16"
    assert f"published in fewer bits: {DOWN}" in plan.report()


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "gptq",
            {"scales": np.full((6, 128), np.inf, np.float16)},
            rf"{DOWN}: the scales of {NAME}weight in .*model.safetensors contain",
        ),
        (
            "nf4 nested",
            {"weight.nested_absmax": np.array([1, np.nan], np.float32)},
            rf"{DOWN}: the scales of {NAME}weight in .* are not finite",
        ),
        (
            "nf4 nested",
            {"weight.nested_quant_map": np.full(256, np.inf, np.float32)},
            rf"{DOWN}: the scales of {NAME}weight in .* are not finite",
        ),
        ("gptq", {"scales": None}, rf"has {NAME}qweight, but no {NAME}scales"),
        (
            "gptq",
            {"scales": np.ones((5, 128), np.float16)},
            rf"{NAME}weight: .*safetensors has scales of shape \(5, 128\) for weights "
            r"of shape \(192, 128\)",
        ),
        (
            "gptq",
            {"weight": np.zeros((128, 192), np.float32)},
            rf"has {NAME}weight, and .* has {NAME}qweight for the same projection",
        ),
        (
            "nf4",
            {"weight": np.zeros((9, 1), np.uint8)},
            rf"{NAME}weight has 9 codes of uint8.* expected 12,288",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(folder, kind, changes, message):
    model = folder(kind)
    change(model, **changes)
    with pytest.raises(InputError, match=message):
        opened(model).read_parameters()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 8}, r"weight: .*model.safetensors has a g_idx of 192 .*expected 96"),
        (
            {"group_size": 64},
            r"weight: .* group_size in .* is 64, which makes 3 of 192",
        ),
    ],
)
def test_settings_that_do_not_fit_the_tensors_are_refused(folder, change, message):
    file = folder("gptq") / "config.json"
    settings = json.loads(file.read_text())
    settings["quantization_config"] |= change
    file.write_text(json.dumps(settings))
    with pytest.raises(InputError, match=message):
        opened(file.parent)


def test_groups_that_the_config_does_not_have_are_refused(folder):
    quantized = folder("pack int4")
    file = quantized / "config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"intermediate_size": 80}))
    with pytest.raises(
        InputError, match=r"mlp/down/kernel is stored as int4 in groups of 32.*80 inp"
    ):
        opened(quantized)
