"""Experts whose kernels stay in four or eight bits."""

import functools
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import optax
import pytest

from prompt_tuning.cli.main import main
from prompt_tuning.core import parameter_groups
from prompt_tuning.core.quantization.nibbles import NORMAL_FLOAT, pack
from prompt_tuning.core.quantization.product import as_float32
from prompt_tuning.core.quantization.stores import (
    DTYPES,
    EXPERT_KERNELS,
    part_path,
    weight_shape,
)
from prompt_tuning.models import experts
from prompt_tuning.pretrained.prompted_model import PromptedModel, open_pretrained
from prompt_tuning.pretrained.tuning import Tuning
from prompt_tuning.prompts.low_rank_adapters import LoRA
from prompt_tuning.prompts.soft import SoftPrompt
from prompt_tuning.settings.mesh_shape import MeshShape
from prompt_tuning.settings.pretrained import Pretrained, WeightLocation
from prompt_tuning.training.gradients import gradients
from tests.support import dummies, meshes
from tests.support.adapters import batch_of, our_logits
from tests.support.exhaustive import sample
from tests.support.quantized_folders import enlarge, write_mxfp4, write_quantized

FIXTURES = Path(__file__).parents[1] / "fixtures/families"
EXPERTS = [f"decoder/layers/mlp/{name}" for name in EXPERT_KERNELS]
TUNED = Tuning(
    prompt=functools.partial(SoftPrompt, length=3),
    adapters=[LoRA(rank=2, regexes=[".*"])],
)
WIDE = "float32"
STORES = {
    "mixtral int4": "int4 in groups of 32",
    "mixtral int8": "int8",
    "mixtral gptq": "int4 in groups of 32 with zero points",
    "mixtral fp8": "float8_e4m3fn",
    "gpt_oss": "mxfp4 in groups of 32",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Mapping[str, Path]:
    parent = tmp_path_factory.mktemp("experts")
    mixtral = enlarge(FIXTURES / "mixtral/base", parent / "mixtral", 8)
    gpt_oss = enlarge(FIXTURES / "gpt_oss/base", parent / "gpt_oss", 8)
    return {
        "mixtral": mixtral,
        "mixtral int4": quantized(mixtral, parent / "int4", "int4", "--group", "32"),
        "mixtral int8": quantized(mixtral, parent / "int8", "int8"),
        "mixtral gptq": write_quantized(mixtral, parent / "gptq", "gptq"),
        "mixtral fp8": write_quantized(mixtral, parent / "fp8", "fp8"),
        "gpt_oss in float32": gpt_oss,
        "gpt_oss": write_mxfp4(
            Path(shutil.copytree(gpt_oss, parent / "mxfp4")),
        ),
    }


def quantized(base: Path, folder: Path, store: str, *options: str) -> Path:
    assert main(["quantize", str(base), str(folder), "--store", store, *options]) == 0
    return folder


def opened(
    folder: Path,
    dtype: str | None = None,
    tuning: Tuning | None = None,
    mesh: MeshShape | None = None,
    weights: WeightLocation = "device",
) -> PromptedModel:
    source = Pretrained(checkpoint=str(folder), parameter_dtype=dtype, weights=weights)
    return open_pretrained(source, tuning, key=jax.random.key(0), mesh=mesh)


@pytest.mark.slow
@pytest.mark.parametrize("kind", STORES)
def test_experts_stand_for_the_published_weights(kind, folders):
    """In the codes of the folder, and each expert apart."""
    plan = opened(folders[kind]).plan
    parameters, wide = plan.restore(), opened(folders[kind], WIDE).plan.restore()
    for path in EXPERTS:
        assert str(plan.stores[path]) == STORES[kind]
        parts = ("scale", "codebook", "zero", "order")
        others = [parameters.get(part_path(path, part)) for part in parts]
        meant = jax.vmap(jax.vmap(cast(Any, as_float32)))(parameters[path], *others)
        np.testing.assert_array_equal(meant, wide[path])
    assert "widened" not in plan.report()
    router = parameters["decoder/layers/mlp/router/kernel"]
    assert router.dtype.name in DTYPES


def test_layers_and_shards_equal_the_whole(folders):
    folder = folders["gpt_oss"]
    whole = opened(folder).plan.restore()
    streamed = opened(folder, weights="streamed").weight_storage.streamed
    mesh = MeshShape(data=2, fsdp=2, tensor=2)
    sharded = opened(folder, mesh=mesh).read_parameters()
    for path in EXPERTS:
        for part in (path, part_path(path, "scale"), part_path(path, "codebook")):
            np.testing.assert_array_equal(streamed[part].read(1), whole[part][1])
            for shard in sharded[part].addressable_shards:
                np.testing.assert_array_equal(shard.data, whole[part][shard.index])


@pytest.mark.parametrize(
    ("kind", "group"), [("mixtral", 16), ("gpt_oss in float32", None)]
)
def test_experts_are_packed_when_they_are_read(kind, group, folders):
    """Stored apart, and all those of a layer in one tensor."""
    source = Pretrained(
        checkpoint=str(folders[kind]), parameter_dtype="nf4", quantization_group=group
    )
    packed = open_pretrained(source, key=jax.random.key(0)).plan.restore()
    wide = opened(folders[kind]).plan.restore()
    for path in EXPERTS:
        kernel, scale = pack(wide[path], NORMAL_FLOAT, group)
        np.testing.assert_array_equal(packed[path], kernel)
        np.testing.assert_array_equal(packed[part_path(path, "scale")], scale)
    assert packed["decoder/layers/mlp/router/kernel"].dtype.name == "bfloat16"


def outcome(folder: Path, dtype: str | None):
    """The gradients of a prompt and of LoRA, the loss, and the compiled program."""
    model = opened(folder, dtype, TUNED)
    parameters = model.read_parameters()
    for path in parameters:
        if path.endswith("lora/b"):  # it is 0, and so is the gradient of a
            parameters[path] = parameters[path] + 0.01
    group = parameter_groups.ParameterGroup(
        [".*/prompt/.*", ".*/adapters/.*"], parameter_groups.adamw()
    )
    labels = parameter_groups.label(parameters, [group])
    trained, frozen = parameter_groups.partition(parameters, labels)
    batch = dummies.make_batch(
        model.config, dummies.random_rows([(4, 3), (2, 5)], 0, 23)
    )
    step = jax.jit(functools.partial(gradients, model.graph, key=None))
    compiled = step.lower(trained, frozen, batch).compile()
    gradient, sums = compiled(trained, frozen, batch)
    return gradient, float(sums.loss), frozen, str(compiled.as_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype", "grouped"),
    [
        ("mixtral gptq", None, False),
        ("mixtral int8", None, False),
        *sample(
            1,
            [
                ("gpt_oss", None, True),
                ("mixtral fp8", None, False),
                ("mixtral int4", None, False),
            ],
        ),
    ],
)
def test_gradients_equal_those_of_the_widened_experts(
    kind, dtype, grouped, folders, monkeypatch
):
    if grouped:  # as on a GPU
        monkeypatch.setattr(experts, "GROUPED", ("cpu",))
    gradient, loss, frozen, program = outcome(folders[kind], dtype)
    same_gradient, same_loss, *_ = outcome(folders[kind], WIDE)
    assert loss == pytest.approx(same_loss, rel=1e-5)
    for path, leaf in same_gradient.items():
        largest = np.abs(leaf).max()
        assert largest > 0
        np.testing.assert_allclose(gradient[path], leaf, atol=1e-5 * max(largest, 1))
    # Neither a stack of layers is wide, nor, one by one, all experts of a layer.
    for path in EXPERTS:
        layers, *wide = weight_shape(path, frozen[path])
        for shape in [[layers, *wide], *([] if grouped else [wide])]:
            size = ",".join(map(str, shape))
            assert not re.findall(rf"(?:f32|bf16)\[{size}\]", program)


@pytest.mark.slow
def test_losses_on_a_mesh_are_those_of_one_device(folders):
    """In the first steps.

    Later this random model amplifies any rounding: on one device, too, a change of the
    prompt by 1e-6 changes the loss by 5e-3 after six steps of 1e-2, and the widened
    weights drift apart on a mesh as these do.
    """
    model = opened(folders["gpt_oss"], tuning=TUNED)
    group = parameter_groups.ParameterGroup(
        [".*/prompt/.*", ".*/adapters/.*"], parameter_groups.adamw()
    )
    tuned = model.graph, model.read_parameters(), [group]
    batch = dummies.make_batch(
        model.config, dummies.random_rows(meshes.ROWS, vocabulary_size=23)
    )
    layout = meshes.layout_of(MeshShape(data=1, fsdp=2, tensor=2), model.config)
    one, many = (
        meshes.curve(tuned, batch, on, optimizer=optax.sgd(1e-3))
        for on in (None, layout)
    )
    assert one[4] < one[0] - 0.1
    np.testing.assert_allclose(many[:5], one[:5], rtol=1e-5)


@pytest.mark.torch
def test_mxfp4_gives_the_logits_of_transformers(folders):
    """Which widens the experts, as without a GPU."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import (  # pyright: ignore[reportMissingImports]
        AutoModelForCausalLM,
        Mxfp4Config,
    )

    ids = np.array([[5, 1, 7, 3, 22, 9, 14, 2]])
    theirs = AutoModelForCausalLM.from_pretrained(
        folders["gpt_oss"],
        dtype=torch.float32,
        quantization_config=Mxfp4Config(dequantize=True),
    )
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    model = opened(folders["gpt_oss"])
    assert str(model.plan.stores[EXPERTS[0]]) == STORES["gpt_oss"]
    batch = batch_of({"input_ids": ids, "attention_mask": np.ones_like(ids)})
    logits = our_logits(model.read_parameters(), batch, graph=model.graph)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
