"""Runs with sharded prompts and adapters equal runs with replicated ones."""

import dataclasses
import functools
import os
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as Spec

from prompt_tuning.checkpoints.run_store.checkpoint_names import FOLDER
from prompt_tuning.cli.main import main
from prompt_tuning.config import gin_files
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import ParameterAxes
from prompt_tuning.data.batching.batches import stream_batches
from prompt_tuning.settings.axis_rules import NAMES, TRAINED_NAMES, AxisRules
from prompt_tuning.settings.mesh_shape import MeshShape
from prompt_tuning.training.opening import open_run
from tests.support import dummies, meshes, methods
from tests.support.exhaustive import sample

CONFIGS = {
    "decoder": dummies.with_dropout(dummies.LLAMA, 0.1),
    "gpt2": dummies.with_dropout(dummies.GPT2, 0.1),
    # The head width can be divided.
    "t5": dataclasses.replace(dummies.T5_GATED, dropout_rate=0.1, head_width=4),
}
METHODS = {method.name: method for method in methods.METHODS}
METHODS["biases"] = methods.Method(
    name="biases",
    files=("adapters/lora.gin",),
    choices=("LoRA.at = 'all-linear'", "LoRA.bias = 'all'"),
)
MESHES = {
    "data 2, fsdp 2, tensor 2": MeshShape(data=2, fsdp=2, tensor=2),
    # More devices along `tensor` than key/value heads.
    "fsdp 2, tensor 4": MeshShape(data=1, fsdp=2, tensor=4),
}
MOST, SHARED_HEADS = MESHES
BOTH = ("fsdp", "tensor")
RULES = {
    "an axis each": [
        *((name, "fsdp") for name in ("prompt_embed", "prompt_middle", "adapter")),
        *((name, "fsdp") for name in ("task_projection", "prompt_head")),
        *((name, "tensor") for name in ("tasks", "prompt", "prompt_hidden", "rank")),
        *((name, None) for name in ("prompt", "rank")),
    ],
    "both axes": [
        *((name, BOTH) for name in ("prompt_embed", "prompt_head", "prompt_hidden")),
        *((name, BOTH) for name in ("task_projection", "prompt_heads")),
        *((name, None) for name in ("prompt_hidden", "prompt_heads", "adapter")),
        *((name, "fsdp") for name in ("rank", "prompt_layers")),
        *((name, None) for name in ("rank", "prompt_layers")),
    ],
}
EACH, TOGETHER = RULES
# EVERY_MESH=1 runs all methods on all models.
CHOSEN = [
    ("LoRA and a soft prompt", "decoder", MOST, EACH),
    ("projected prefix", "t5", MOST, EACH),
    ("LoRA", "decoder", SHARED_HEADS, TOGETHER),
    ("deep prompt", "gpt2", MOST, TOGETHER),
    ("biases", "gpt2", MOST, EACH),
]
if os.environ.get("EVERY_MESH"):
    CHOSEN = [
        (name, family, MOST, EACH)
        for name, method in METHODS.items()
        for family in CONFIGS
        if family not in method.refused
    ]
# Together they train all kinds of parameters.
KINDS = [
    *("LoRA", "IA3", "MLP over a prompt", "deep prompt", "projected prefix"),
    *("key/value prefix", "several tasks: project", "several tasks: factorized"),
]


@functools.cache
def method_case(name: str, family: str):
    """A model for a method, rows for it, and the loss curve on one device."""
    soft = 4 if name.startswith("template") else 0
    sizes = [size.replace("{soft:1}", "{soft:2}") for size in METHODS[name].sizes]
    # Wayward prompts are as long as their text.
    sizes = ["PROMPT_TEXT = 'upup'" if "TEXT" in size else size for size in sizes]
    method = dataclasses.replace(METHODS[name], sizes=(*sizes, "PROMPT_LENGTH = 4"))
    config = CONFIGS[family]
    batch = meshes.batch_of(config, tasks=name.startswith("several"), soft=soft)
    model = meshes.tuned(config, method)
    return model, batch, meshes.curve(model, batch, None)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "family", "mesh", "rules"), sample(1, CHOSEN))
def test_sharded_parameters_have_the_losses_of_one_device(name, family, mesh, rules):
    model, batch, alone = method_case(name, family)
    table = AxisRules(rules=RULES[rules])
    layout = meshes.layout_of(MESHES[mesh], CONFIGS[family], table)
    losses = meshes.curve(model, batch, layout)
    np.testing.assert_allclose(losses, alone, rtol=1e-5)


def test_every_dimension_of_a_trained_parameter_has_a_name():
    names = set()
    state = methods.Method(name="state prefix", files=("prompts/state_prefix.gin",))
    cases = [(CONFIGS["decoder"], METHODS[name]) for name in KINDS]
    for config, method in [*cases, (dummies.GRANITE4, state)]:
        layout = meshes.layout_of(MESHES[MOST], config)
        graph, parameters, _ = meshes.tuned(config, method)
        placement = meshes.placed(layout, graph, parameters)
        trained_axes = {p: x for p, x in placement.axes.items() if _is_trained(p)}
        assert trained_axes, method.name
        names |= {name for axes in trained_axes.values() for name in axes.names}
        # Without a rule: replicated, or sharded like the kernel.
        assert not any("fsdp" in placement.shardings[p].spec for p in trained_axes)
    assert names >= set(TRAINED_NAMES)
    assert names <= {*NAMES, "layers"}


def _is_trained(path: str) -> bool:
    return "/prompt/" in path or "/adapters/" in path


def spec(names: tuple[str, ...], *rules) -> Spec:
    layout = meshes.layout_of(
        MeshShape(data=1, fsdp=2, tensor=2), dummies.LLAMA, AxisRules(rules=rules)
    )
    return layout.spec("a path", names)


def test_a_kernels_dimensions_precede_those_of_its_adapter():
    rank = ("rank", "tensor"), ("rank", None)
    assert spec(("layers", "rank", "heads"), *rank) == Spec(None, None, "tensor")
    assert spec(("layers", "adapter", "rank"), *rank) == Spec(None, None, "tensor")
    with pytest.raises(InputError, match=r"rule for 'rank' needs tensor.*\('rank', No"):
        spec(("layers", "rank", "heads"), *rank[:1])


def test_an_indivisible_prompt_is_refused():
    layout = meshes.layout_of(
        MeshShape(data=1, fsdp=8), dummies.LLAMA, AxisRules(rules=[("prompt", "fsdp")])
    )
    axes = {"decoder/prompt/prompt": ParameterAxes(("prompt", "prompt_embed"))}
    shapes = {"decoder/prompt/prompt": jax.ShapeDtypeStruct((100, 16), np.float32)}
    with pytest.raises(InputError, match="has 100 numbers along 'prompt', which cann"):
        layout.shardings(axes, shapes)


SPLIT = [
    "Run.mesh = @MeshShape()",
    "MeshShape.data = 2",
    "MeshShape.fsdp = 2",
    "MeshShape.tensor = 2",
]
BY_BOTH = [
    "MeshShape.rules = @AxisRules()",
    "AxisRules.rules = [('prompt', 'tensor'), ('prompt_embed', 'fsdp')]",
]
ADAM = ["ParameterGroup.optimizer = @adamw()", "adamw.learning_rate = 0.01"]


def arguments(files, directory: Path, bindings: list[str]) -> list[str]:
    steps = {"Run__steps": 2, "Run__evaluation": None, "Run__keep_best": None}
    given = files.arguments(directory, **steps)
    return [*given, *(f"--gin.{each}" for each in [*ADAM, *bindings])]


def test_a_device_has_its_shard_of_the_prompt_and_of_the_optimizer_state(
    files, tmp_path
):
    given = arguments(files, tmp_path / "run", [*SPLIT, *BY_BOTH])
    bindings = [each.removeprefix("--gin.") for each in given[1:]]
    trainer = open_run(gin_files.read_run(["runs/first_prompt.gin"], bindings))
    batches = stream_batches(trainer.examples, trainer.batch_plan, 0, 1, pad_id=0)
    placement = trainer.model.placement
    assert placement is not None
    batch = placement.put_batch(next(iter(batches)))
    state, _ = trainer.step(trainer.start, trainer.frozen, batch)
    leaves = jax.tree.leaves((state.trained, state.optimizer_state))
    actual = [leaf for leaf in leaves if leaf.shape == (4, 16)]
    # The prompt and Adam's two moments.
    assert len(actual) == 3
    for leaf in actual:
        assert leaf.sharding.spec == Spec("tensor", "fsdp")
        assert len(leaf.addressable_shards) == 8
        assert {shard.data.shape for shard in leaf.addressable_shards} == {(2, 8)}


@pytest.mark.exhaustive
def test_the_checkpoint_equals_that_of_a_replicated_prompt(files, tmp_path):
    runs = {"split": [*SPLIT, *BY_BOTH], "whole": SPLIT}
    for name, bindings in runs.items():
        assert main(["train", *arguments(files, tmp_path / name, bindings)]) == 0
    split, whole = (tmp_path / name / FOLDER / "checkpoint_2" for name in runs)
    names = sorted(path.name for path in whole.iterdir())
    assert sorted(path.name for path in split.iterdir()) == names
    (prompt,) = (name for name in names if name.endswith(".npy"))
    (moments,) = (name for name in names if name.endswith(".npz"))
    for name in (prompt, moments):
        actual, expected = (arrays(folder / name) for folder in (split, whole))
        assert actual.keys() == expected.keys()
        for key, array in expected.items():
            assert (actual[key].shape, actual[key].dtype) == (array.shape, array.dtype)
            np.testing.assert_allclose(actual[key], array, atol=1e-6)


def arrays(file: Path) -> dict[str, np.ndarray]:
    loaded = np.load(file)
    return {"": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
