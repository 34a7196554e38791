"""LoRA of experts, PEFT's `target_parameters`: trained, read, written and merged."""

import json
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import save_file

from prompt_tuning import families
from prompt_tuning.adapters.adapter import LORA, Adapter
from prompt_tuning.adapters.merge import write_merged
from prompt_tuning.adapters.peft.expert_parameters import MISREAD, MISREAD_FAMILIES
from prompt_tuning.adapters.peft.folder import read_folder, write_folder
from prompt_tuning.adapters.peft.modules import projections
from prompt_tuning.adapters.peft.peft_conversion import from_peft, to_peft
from prompt_tuning.core.errors import InputError
from prompt_tuning.families.hf_folder import read_config
from prompt_tuning.pretrained.prompted_model import open_pretrained
from prompt_tuning.pretrained.tuning import Tuning
from prompt_tuning.prompts.low_rank_adapters import LoRA
from prompt_tuning.settings.pretrained import Pretrained
from tests.support.adapters import (
    assert_same_logits,
    batch_of,
    our_logits,
    peft_logits,
    restored,
    train_by_peft,
)

FAMILIES = Path(__file__).parents[2] / "fixtures/families"
INWARD, OUTWARD = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
STEPS, RATE = 24, 0.1
# Fused inward columns that alternate, or that follow each other; three ways to select.
CASES = {
    "gpt_oss": {
        "target_parameters": [INWARD, OUTWARD],
        "target_modules": ["q_proj"],
        "rank_pattern": {"experts.down_proj": 3},
        "r": 2,
    },
    "mixtral": {"target_parameters": [OUTWARD], "target_modules": [], "r": 2},
    "nemotron_h": {  # without gates
        "target_parameters": ["experts.up_proj", OUTWARD.removeprefix("mlp.")],
        "target_modules": [],
        "r": 2,
    },
    "qwen2_moe": {"target_parameters": ["gate_up_proj"], "use_rslora": True}
    | {"target_modules": []},
    # With routers.
    "qwen3_moe": {"target_modules": "all-linear"},
    "deepseek_v3": {
        "target_parameters": ["gate.weight"],
        "target_modules": ["o_proj"],
        "rank_pattern": {"gate.weight": 3},
        "r": 2,
    },
}
ROUTERS = {"qwen3_moe", "deepseek_v3"}


def tokens_of(family):
    given = np.load(FAMILIES / family / "ref.npz")
    tokens = {name: given[name] for name in ("input_ids", "attention_mask")}
    tokens["attention_mask"] = np.ones_like(tokens["attention_mask"])
    targets = np.random.default_rng(0).integers(3, 20, tokens["input_ids"].shape)
    return tokens, targets


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """The folder of each case, as `peft_training` writes it."""
    folder = tmp_path_factory.mktemp("experts")
    jobs = {}
    for family, settings in CASES.items():
        tokens, targets = tokens_of(family)
        np.savez(folder / f"{family}.npz", targets=targets, **tokens)
        jobs[family] = {
            "base": str(FAMILIES / family / "base"),
            "folder": str(folder / family),
            "tokens": str(folder / f"{family}.npz"),
            "steps": STEPS,
            "learning_rate": RATE,
            "task_type": "CAUSAL_LM",
            **settings,
        }
    train_by_peft(jobs)
    return folder


def read(folder, family):
    return from_peft(read_folder(folder), read_config(FAMILIES / family / "base"), "it")


@pytest.mark.torch
def test_experts_that_peft_trained_are_read_written_and_merged(theirs, tmp_path):
    jobs, ours = {}, {}
    for family in CASES:
        base, tokens = FAMILIES / family / "base", tokens_of(family)[0]
        adapter = read(theirs / family / "end", family)
        assert any("/router/" in x for x in adapter.parameters) == (family in ROUTERS)
        graph, parameters = restored(base, adapter)
        ours[family] = our_logits(parameters, batch_of(tokens), graph=graph)
        expected = np.load(theirs / family / "end.npz")["logits"]
        assert_same_logits(ours[family], expected, tokens)
        written = to_peft(adapter, read_config(base), base_model=str(base))
        write_folder(tmp_path / family, written)
        assert read_folder(tmp_path / family).tensors.keys() == written.tensors.keys()
        write_merged(tmp_path / f"merged {family}", base, [adapter])
        np.savez(tmp_path / f"{family}.npz", **tokens)
        given = {"tokens": tmp_path / f"{family}.npz"}
        jobs[family] = given | {"base": base, "adapter": tmp_path / family}
        jobs[f"{family} merged"] = given | {"base": tmp_path / f"merged {family}"}
    for job, logits in peft_logits(jobs).items():
        family = job.partition(" ")[0]
        assert_same_logits(ours[family], logits, tokens_of(family)[0])


def of_single_experts(folder):
    """Writes a LoRA as transformers 4 named it, with modules of each expert."""
    config = read_config(FAMILIES / "mixtral" / "base")
    random, tensors = np.random.default_rng(0), {}
    width, inner = config.width, config.feed_forward_width
    sizes = {"w1": (width, inner), "w3": (width, inner), "w2": (inner, width)}
    for layer in range(config.layers):
        block = f"base_model.model.model.layers.{layer}"
        modules = {
            f"{block}.self_attn.q_proj": (width, config.heads * config.head_width),
            f"{block}.block_sparse_moe.gate": (width, config.experts),
        }
        for expert in range(config.experts):
            for name, size in sizes.items():
                experts = f"{block}.block_sparse_moe.experts.{expert}"
                modules[f"{experts}.{name}"] = size
        for module, (size_in, size_out) in modules.items():
            a, b = random.normal(size=(3, size_in)), random.normal(size=(size_out, 3))
            tensors[f"{module}.lora_A.weight"] = a.astype("f4")
            tensors[f"{module}.lora_B.weight"] = b.astype("f4")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 1}
    settings["target_modules"] = ["q_proj", "gate", "w1", "w2", "w3"]
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")


@pytest.mark.torch
def test_experts_with_modules_of_their_own_are_read_as_by_peft(tmp_path):
    of_single_experts(tmp_path / "theirs")
    base, tokens = FAMILIES / "mixtral" / "base", tokens_of("mixtral")[0]
    adapter = read(tmp_path / "theirs", "mixtral")
    written = to_peft(adapter, read_config(base), base_model=str(base))
    write_folder(tmp_path / "ours", written)
    np.savez(tmp_path / "tokens.npz", **tokens)
    given = {"base": base, "tokens": tmp_path / "tokens.npz"}
    jobs = {name: given | {"adapter": tmp_path / name} for name in ("theirs", "ours")}
    graph, parameters = restored(base, adapter)
    ours = our_logits(parameters, batch_of(tokens), graph=graph)
    for logits in peft_logits(jobs).values():
        assert_same_logits(ours, logits, tokens)


@pytest.mark.torch
def test_experts_train_as_in_peft(theirs):
    family = "mixtral"
    tokens, targets = tokens_of(family)
    source = Pretrained(checkpoint=str(FAMILIES / family / "base"))
    tuning = Tuning(adapters=(LoRA(at=[OUTWARD], rank=2, alpha=8),))
    model = open_pretrained(source, tuning, key=jax.random.key(0))
    start = read(theirs / family / "start", family).parameters
    frozen = model.read_parameters()
    assert start.keys() == model.plan.fresh.keys()
    batch = batch_of(tokens)

    def loss(trained):
        logits = our_logits(frozen | trained, batch, graph=model.graph)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    optimizer = optax.sgd(RATE, momentum=0.9)

    @jax.jit
    def step(trained, state):
        value, gradient = jax.value_and_grad(loss)(trained)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(trained, updates), state, value

    trained, state, losses = start, optimizer.init(start), []
    for _ in range(STEPS):
        trained, state, value = step(trained, state)
        losses.append(float(value))
    expected = np.load(theirs / family / "end.npz")["losses"]
    assert expected[-1] < expected[0] - 0.01
    np.testing.assert_allclose(losses, expected, atol=3e-6)


@pytest.mark.torch
def test_families_whose_names_peft_takes_for_experts_are_known():
    from peft.utils.transformers_weight_conversion import (  # pyright: ignore[reportMissingImports]
        _MODEL_TO_CONVERSION_PATTERN,
        _MOE_TARGET_MODULE_MAPPING,
    )

    taken = {
        family
        for family, pattern in _MODEL_TO_CONVERSION_PATTERN.items()
        if {*MISREAD} <= _MOE_TARGET_MODULE_MAPPING.get(pattern, {}).keys()
    }
    assert taken & families.FAMILIES.keys() == MISREAD_FAMILIES


def test_a_lora_of_shared_experts_that_peft_would_misread_is_refused():
    config = read_config(FAMILIES / "glm4_moe" / "base")
    path = "decoder/layers/mlp/shared/down"
    count = len(projections(config)[path].modules)
    arrays = {
        f"{path}/adapters/lora/a": np.ones((count, 8, 2), np.float32),
        f"{path}/adapters/lora/b": np.ones((count, 2, 8), np.float32),
    }
    adapter = Adapter(kind=LORA, parameters=arrays, scalings={path: 1.0})
    with pytest.raises(InputError, match="which PEFT would take for one of the exp"):
        to_peft(adapter, config, base_model="base")
