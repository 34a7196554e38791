"""Sixty forms in which people have adapters: read as what they are, or refused.

Each form is a change of a folder that PEFT wrote. Those that PEFT reads, too, have the
logits that it computes.
"""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from prompt_tuning.adapters.adapter import Adapter
from prompt_tuning.adapters.peft.folder import read_folder
from prompt_tuning.adapters.peft.peft_conversion import from_peft
from prompt_tuning.core.errors import InputError
from prompt_tuning.families.hf_folder import read_config
from tests.support.adapters import (
    assert_same_logits,
    batch_of,
    our_logits,
    peft_logits,
    restored,
)
from tests.support.shared_data import FIXTURES

PEFT = FIXTURES / "peft"
LLAMA, GPT2 = "llama_gqa_untied/lora", "gpt2_tied/lora"
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
ROOT = "base_model.model."
Content = tuple[dict[str, Any], dict[str, np.ndarray]]


def contents(case: str) -> Content:
    """Returns the settings and tensors of a folder of PEFT."""
    settings = json.loads((PEFT / case / CONFIG).read_text())
    return settings, load_file(PEFT / case / TENSORS)


def write(folder: Path, settings, tensors, *, config=CONFIG, file=TENSORS) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if settings is not None:
        (folder / config).write_text(json.dumps(settings))
    if tensors:
        save_file(
            {n: np.ascontiguousarray(x) for n, x in tensors.items()}, folder / file
        )


def read(folder: Path, case: str) -> Adapter:
    return from_peft(read_folder(folder), read_config(PEFT / case / "../base"), "it")


def renamed(rename: Callable[[str], str]) -> Callable[[Path], None]:
    def form(folder: Path) -> None:
        settings, tensors = contents(LLAMA)
        write(folder, settings, {rename(n): x for n, x in tensors.items()})

    return form


def replaced(old: str, new: str) -> Callable[[Path], None]:
    return renamed(lambda name: name.replace(old, new))


def stored_as(dtype) -> Callable[[Path], None]:
    def form(folder: Path) -> None:
        settings, tensors = contents(LLAMA)
        write(folder, settings, {n: x.astype(dtype) for n, x in tensors.items()})

    return form


def below(*names: str) -> Callable[[Path], None]:
    """The adapter in a subfolder."""
    return lambda folder: write(folder.joinpath(*names), *contents(LLAMA))


def with_files(*names: str) -> Callable[[Path], None]:
    """The adapter among other files, as axolotl and trainers leave them."""

    def form(folder: Path) -> None:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("{}")
        write(folder, *contents(LLAMA))

    return form


def mlx(folder: Path) -> None:
    _, tensors = contents(LLAMA)
    names = {".lora_A.weight": ".lora_a", ".lora_B.weight": ".lora_b"}
    own = {}
    for name, x in tensors.items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        own[name.removeprefix(ROOT)] = x.T
    settings = {"model": "x", "lora_parameters": {"rank": 4, "scale": 2.0}}
    write(folder, settings, own, file="adapters.safetensors")


RENAMED = {
    "default in names": replaced(".weight", ".default.weight"),
    "another name in names": replaced(".weight", ".style-2.weight"),
    "DDP": renamed(lambda name: "module." + name),
    "torch.compile": replaced(ROOT, ROOT + "_orig_mod."),
    "torch.compile outside": renamed(lambda name: "_orig_mod." + name),
    "FSDP": replaced("self_attn", "_fsdp_wrapped_module.self_attn"),
    "checkpointing": replaced("self_attn", "_checkpoint_wrapped_module.self_attn"),
    "no prefix": replaced(ROOT, ""),
    "no prefix, default": renamed(
        lambda name: name.replace(ROOT, "").replace(".weight", ".default.weight")
    ),
    "two prefixes": renamed(lambda name: ROOT + name),
    "model without a head": replaced(ROOT + "model.", ROOT),
    "float16": stored_as(np.float16),
    "bfloat16": stored_as(ml_dtypes.bfloat16),
    "float64": stored_as(np.float64),
    "named adapter": below("style"),
    "only a trainer's checkpoint": below("checkpoint-10"),
    "axolotl": with_files("README.md", "tokenizer.json", "checkpoint-1/trainer.json"),
    "beside a pickle": with_files("adapter_model.bin", "training_args.bin"),
    "MLX": mlx,
}
"""Forms of the same numbers under other names."""

OLD = {
    "base_model_name_or_path": "decapoda-research/llama-7b-hf",
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "lora_alpha": 8,
    "lora_dropout": 0.05,
    "modules_to_save": None,
    "peft_type": "LORA",
    "r": 4,
    "target_modules": ["q_proj", "v_proj"],
    "task_type": "CAUSAL_LM",
}
UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)"
    r".*?(?:q_proj|k_proj|v_proj|o_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\."
    r"(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\.(?:(?:q_proj|v_proj)))"
)


def only(**settings) -> Callable[[dict], dict]:
    """Settings instead of PEFT's own."""
    return lambda _: settings


def changed(**settings) -> Callable[[dict], dict]:
    return lambda given: given | settings


def without(*names: str) -> Callable[[dict], dict]:
    return lambda given: {k: x for k, x in given.items() if k not in names}


CONFIGURED = {
    "PEFT 0.2": (LLAMA, only(**OLD, enable_lora=None, merge_weights=False)),
    "PEFT 0.3": (LLAMA, only(**OLD)),
    "PEFT 0.4": (
        LLAMA,
        only(**OLD, layers_pattern=None, layers_to_transform=None, revision=None),
    ),
    "only what it needs": (
        LLAMA,
        only(peft_type="LORA", r=4, target_modules=["q_proj", "v_proj"]),
    ),
    "no version": (LLAMA, without("peft_version")),
    "the default alpha": (LLAMA, without("lora_alpha")),
    "a broken alpha": (LLAMA, changed(lora_alpha=12.5)),
    "rank-stabilized": (LLAMA, changed(use_rslora=True)),
    "alpha by suffix": (LLAMA, changed(alpha_pattern={"v_proj": 3})),
    "alpha by expression": (LLAMA, changed(alpha_pattern={r"0\..*\.q_proj": 3})),
    "alpha by PEFT 0.14": (LLAMA, changed(alpha_pattern={"^model.layers.1.*": 3})),
    "rank by suffix": (LLAMA, changed(r=64, rank_pattern={"q_proj": 4, "v_proj": 4})),
    "ends of names": (LLAMA, changed(target_modules=["self_attn.q_proj", "v_proj"])),
    "an expression": (LLAMA, changed(target_modules=r".*\.self_attn\.[qv]_proj")),
    "unsloth": (LLAMA, changed(target_modules=UNSLOTH)),
    "unsloth's mark": (LLAMA, changed(unsloth_fixed=True)),
    "excluded modules": (
        LLAMA,
        changed(
            target_modules=["q_proj", "v_proj", "k_proj"], exclude_modules=["k_proj"]
        ),
    ),
    "all linear": (LLAMA, changed(target_modules="all-linear")),
    "a field of tomorrow, off": (LLAMA, changed(of_tomorrow=None, other={})),
    "a field of tomorrow, on": (LLAMA, changed(of_tomorrow={"a": 1})),
    "runtime config": (LLAMA, changed(runtime_config={"ephemeral_gpu_offload": False})),
    "in training": (LLAMA, changed(inference_mode=False, lora_dropout=0.3)),
    "no task": (LLAMA, changed(task_type=None)),
    "another start": (LLAMA, changed(init_lora_weights="gaussian")),
    "EVA": (LLAMA, changed(init_lora_weights="eva", eva_config={"rho": 2.0})),
    "LoftQ's config": (LLAMA, changed(loftq_config={"loftq_bits": 4})),
    "Conv1D's order": (LLAMA, changed(fan_in_fan_out=True)),
    "Conv1D": (GPT2, changed()),
    "Conv1D as Linear": (GPT2, changed(fan_in_fan_out=False)),
}
"""Changed settings: the model, and the change."""
WARNED = {
    "unsloth's mark": "unknown setting 'unsloth_fixed' = True",
    "a field of tomorrow, on": "unknown setting 'of_tomorrow'",
}


def configured(folder: Path, case: str, change: Callable[[dict], dict]) -> None:
    settings, tensors = contents(case)
    write(folder, change(settings), tensors)


def setting(**settings) -> Callable[[Path], None]:
    return lambda folder: configured(folder, LLAMA, changed(**settings))


def files(settings, tensors, **names) -> Callable[[Path], None]:
    return lambda folder: write(folder, settings, tensors, **names)


def pickled(folder: Path) -> None:
    write(folder, contents(LLAMA)[0], None)
    (folder / "adapter_model.bin").write_bytes(b"PK")


def beside(name: str, shape) -> Callable[[Path], None]:
    def form(folder: Path) -> None:
        settings, tensors = contents(LLAMA)
        write(folder, settings, tensors | {name: np.ones(shape, np.float32)})

    return form


ONES = np.ones((4, 16), np.float32)
QUERY = "model.layers.0.self_attn.q_proj"
REFUSED = {
    "a damaged pickle": (pickled, "not an archive.*weights_only=True"),
    "no settings": (
        files(None, contents(LLAMA)[1]),
        "adapter_config.json is missing from the adapter",
    ),
    "kohya": (
        files(
            contents(LLAMA)[0],
            {f"lora_te_{QUERY.replace('.', '_')}.lora_down.weight": ONES},
        ),
        "contains lora_te_.* that do not belong to LORA",
    ),
    "diffusers": (
        files(contents(LLAMA)[0], {f"{QUERY}.processor.to_q_lora.down.weight": ONES}),
        "contains .*to_q_lora.* that do not belong to LORA",
    ),
    "TorchTune's own names": (
        files(contents(LLAMA)[0], {"layers.0.attn.q_proj.lora_a.weight": ONES}),
        "contains layers.0.attn.* that do not belong to LORA",
    ),
    "LitGPT": (
        files(contents(LLAMA)[0], {"transformer.h.0.attn.qkv.lora_A": ONES}),
        "contains transformer.h.0.* that do not belong to LORA",
    ),
    "frozen weights": (
        beside(f"{ROOT}{QUERY}.base_layer.weight", (16, 16)),
        "base_layer.weight and 0 other tensors",
    ),
    "another model": (
        beside(f"{ROOT}transformer.h.0.attn.c_attn.lora_A.weight", (4, 16)),
        "but not its lora_B",
    ),
    "MLX, DoRA": (
        files(
            {"fine_tune_type": "dora", "lora_parameters": {}},
            {f"{QUERY}.lora_a": ONES.T},
            file="adapters.safetensors",
        ),
        "fine_tune_type 'dora', expected 'lora'",
    ),
    "another rank": (setting(r=8), "expected rank 8"),
    "a missing layer": (
        setting(layers_to_transform=[1]),
        "that its settings do not select",
    ),
    "biases of the adapter": (setting(lora_bias=True), "biases were added"),
    "DoRA without magnitudes": (setting(use_dora=True), "has no .*magnitude"),
    "repeated layers": (setting(layer_replication=[[0, 1], [0, 1]]), "were repeated"),
    "a whole head": (setting(modules_to_save=["lm_head"]), "whole modules"),
    "AdaLoRA": (setting(peft_type="ADALORA"), "peft_type 'ADALORA', expected one of"),
}
"""Forms that are refused, and the message."""


@pytest.mark.slow
@pytest.mark.parametrize("form", RENAMED.values(), ids=RENAMED)
def test_other_names_are_the_same_adapter(form, tmp_path):
    form(tmp_path / "a")
    expected, found = read(PEFT / LLAMA, LLAMA), read(tmp_path / "a", LLAMA)
    assert found.scalings == expected.scalings
    assert found.parameters.keys() == expected.parameters.keys()
    rounding = 0.004 if form in (RENAMED["float16"], RENAMED["bfloat16"]) else 0
    for path, array in expected.parameters.items():
        np.testing.assert_allclose(found.parameters[path], array, rtol=rounding)


@pytest.mark.parametrize(("form", "message"), REFUSED.values(), ids=REFUSED)
def test_other_forms_are_refused_with_the_reason(form, message, tmp_path):
    form(tmp_path / "a")
    with pytest.raises(InputError, match=message) as raised:
        read(tmp_path / "a", LLAMA)
    assert "\n" not in str(raised.value)


def test_there_are_sixty_forms():
    assert len(RENAMED) + len(CONFIGURED) + len(REFUSED) >= 60


@functools.cache
def tokens_of(case: str) -> dict[str, Any]:
    given = np.load(PEFT / case / "../ref.npz")
    return {name: given[name] for name in ("input_ids", "attention_mask")}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """The folder of each form, and PEFT's logits with it."""
    folder, jobs = tmp_path_factory.mktemp("forms"), {}
    for name, (case, change) in CONFIGURED.items():
        configured(folder / name, case, change)
        tokens = folder / f"{case.partition('/')[0]}.npz"
        np.savez(tokens, **tokens_of(case))
        base = (PEFT / case / "../base").resolve()
        jobs[name] = {"base": base, "adapter": folder / name, "tokens": tokens}
    return folder, peft_logits(jobs)


@pytest.mark.torch
@pytest.mark.parametrize("name", CONFIGURED)
def test_settings_mean_what_they_mean_in_peft(name, theirs, recwarn):
    folder, logits = theirs
    case, _ = CONFIGURED[name]
    adapter = read(folder / name, case)
    warned = [str(warning.message) for warning in recwarn]
    assert len(warned) == (name in WARNED)
    if name in WARNED:
        assert re.search(WARNED[name], warned[0])
    graph, parameters = restored((PEFT / case / "../base").resolve(), adapter)
    batch = batch_of(tokens_of(case))
    ours = our_logits(parameters, batch, graph=graph)
    assert_same_logits(ours, logits[name], tokens_of(case))
