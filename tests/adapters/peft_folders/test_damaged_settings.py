"""Settings of PEFT adapters that have another type or contradict the tensors."""

import json
import re
import time

import numpy as np
import pytest
from safetensors.numpy import save_file

from prompt_tuning.adapters.peft.folder import read_folder
from prompt_tuning.adapters.peft.modules import match_targets
from prompt_tuning.adapters.peft.peft_conversion import from_peft
from prompt_tuning.core.errors import InputError
from tests.support.dummies import LLAMA

MODULE = "model.layers.0.self_attn.q_proj"
A, B = (f"base_model.model.{MODULE}.lora_{x}.weight" for x in "AB")
IA3_NAME = f"base_model.model.{MODULE}.ia3_l"
D, G, K = LLAMA.width, LLAMA.key_value_heads, LLAMA.head_width
ROWS = {"num_virtual_tokens": 4, "token_dim": D, "num_transformer_submodules": 1}


def zeros(*shape):
    return np.zeros(shape, np.float32)


KINDS = {
    "PROMPT_TUNING": (ROWS, {"prompt_embeddings": zeros(4, D)}),
    "P_TUNING": (ROWS, {"prompt_embeddings": zeros(4, D)}),
    "MULTITASK_PROMPT_TUNING": (
        ROWS | {"num_tasks": 2, "num_ranks": 1},
        {
            "prompt_embeddings": zeros(4, D),
            "prefix_task_cols": zeros(2, 4, 1),
            "prefix_task_rows": zeros(2, 1, D),
        },
    ),
    "PREFIX_TUNING": (
        {
            "num_virtual_tokens": 4,
            "num_layers": LLAMA.layers,
            "token_dim": G * K,
            "num_attention_heads": G,
        },
        {"prompt_embeddings": zeros(4, 2 * LLAMA.layers * G * K)},
    ),
    "LORA": (
        {
            "r": 2,
            "lora_alpha": 4,
            "use_rslora": False,
            "alpha_pattern": {"k_proj": 4},
            "rank_pattern": {"k_proj": 2},
            "target_modules": [MODULE],
            "exclude_modules": "k_proj",
        },
        {A: zeros(2, D), B: zeros(LLAMA.heads * K, 2)},
    ),
    "IA3": (
        {"target_modules": [MODULE], "feedforward_modules": []},
        {IA3_NAME: zeros(LLAMA.heads * K, 1)},
    ),
}
COMMON = {"task_type": "CAUSAL_LM", "base_model_name_or_path": "a", "revision": "b"}
WRONG = ({"a": [1]}, [{}], 10**300, -2.5, float("nan"), "8", True)


def write(folder, kind, changes, tensors=None):
    settings, default = KINDS[kind]
    folder.mkdir(exist_ok=True)
    save_file(
        default if tensors is None else tensors, folder / "adapter_model.safetensors"
    )
    content = {"peft_type": kind} | COMMON | settings | changes
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return folder


def read(folder):
    return from_peft(read_folder(folder), LLAMA, str(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_settings_of_another_type_are_refused_with_file_and_name(kind, tmp_path):
    settings = COMMON | KINDS[kind][0]
    assert read(write(tmp_path / "a", kind, {})).parameters
    for name, value in settings.items():
        for wrong in WRONG:
            if type(wrong) is type(value) is not dict:
                continue
            if isinstance(wrong, str) and name in ("target_modules",):
                continue
            folder = write(tmp_path / "a", kind, {name: wrong})
            if name in ("feedforward_modules", "exclude_modules") and wrong == "8":
                continue
            if name == "lora_alpha" and wrong == -2.5:
                continue
            with pytest.raises(InputError, match=r"adapter_config\.json") as raised:
                read(folder)
            assert name in str(raised.value)


# PEFT would adapt both layers.
@pytest.mark.filterwarnings("ignore:.* has no tensors of 1 modules")
@pytest.mark.parametrize("kind", KINDS)
def test_null_settings_have_the_default_or_are_refused(kind, tmp_path):
    for name in COMMON | KINDS[kind][0]:
        folder = write(tmp_path / "a", kind, {name: None})
        try:
            assert read(folder).parameters
        except InputError as error:
            assert str(folder) in str(error)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"r": 0}, "r = 0"),
        ({"rank_pattern": {"q_proj": 0}}, "q_proj = 0"),
        ({"rank_pattern": {"q_proj": 3}}, "expected rank 3"),
        ({"rank_pattern": {"(": 3}}, "not a regular expression"),
        ({"alpha_pattern": {"q_proj": "4"}}, "q_proj = '4'"),
        ({"bias": {"a": 1}}, "bias = "),
        ({"modules_to_save": "a" * 5000}, "modules_to_save = "),
        ({"target_parameters": 5}, "target_parameters = 5"),
        # PEFT would never apply such an adapter.
        ({"alora_invocation_tokens": []}, "one or more token ids"),
    ],
)
def test_settings_of_a_lora_are_checked(changes, expected, tmp_path):
    with pytest.raises(InputError, match=expected) as raised:
        read(write(tmp_path / "a", "LORA", changes))
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    "pattern",
    [
        "(.*)*x",
        "((a|b)+)+$",
        r"(\w+)+",
        "(.|.)" * 30 + "x",
        ".*" * 9 + "x",
        "(.?.?)" * 20 + "x",
    ],
)
@pytest.mark.parametrize("name", ["rank_pattern", "alpha_pattern"])
def test_no_pattern_takes_exponential_time(name, pattern, tmp_path):
    start = time.process_time()
    assert read(write(tmp_path / "a", "LORA", {name: {pattern: 2}})).parameters
    match_targets(pattern, [MODULE])
    assert time.process_time() - start < 10


@pytest.mark.parametrize("name", ["rank_pattern", "alpha_pattern"])
def test_long_patterns_are_refused(name, tmp_path):
    with pytest.raises(InputError, match=name):
        read(write(tmp_path / "a", "LORA", {name: {"a" * 3000: 2}}))
    with pytest.raises(InputError, match="target_modules"):
        match_targets("a" * 3000, [MODULE])


@pytest.mark.parametrize(
    "pattern",
    [
        r".*decoder.*(SelfAttention|EncDecAttention).*(q|v)$",
        r".*\.layers\.[0-9]+\.(self_attn|mlp)\.(q|k|v)_proj",
        r"model.layers.\d+.self_attn.q_proj",
        "q_proj|k_proj",
    ],
)
def test_patterns_of_pefts_documentation_are_matched(pattern):
    names = [MODULE, "q_proj", "a.decoder.SelfAttention.q"]
    expected = {name for name in names if re.fullmatch(pattern, name)}
    assert match_targets(pattern, names) == expected != set()


def test_an_alpha_of_zero_is_read(tmp_path):
    factors = {A: np.ones((2, D), np.float32), B: zeros(LLAMA.heads * K, 2)}
    other = {name.replace("layers.0", "layers.1"): x for name, x in factors.items()}
    changes = {"alpha_pattern": {MODULE: 0}, "lora_alpha": 4}
    changes["target_modules"] = ["q_proj"]
    adapter = read(write(tmp_path / "a", "LORA", changes, factors | other))
    assert set(adapter.scalings.values()) == {2.0}


@pytest.mark.parametrize("kind", ["LORA", "IA3"])
def test_tensors_with_another_prefix_are_refused(kind, tmp_path):
    tensors = {
        name.replace("base_model.model.", "base_model.other."): array
        for name, array in KINDS[kind][1].items()
    }
    with pytest.raises(InputError, match="not a projection"):
        read(write(tmp_path / "a", kind, {}, tensors))


@pytest.mark.parametrize("content", ["7", "null", "[]", "[" * 100_000, "\0", "{"])
def test_files_with_another_shape_are_refused(content, tmp_path):
    folder = write(tmp_path / "a", "LORA", {})
    (folder / "adapter_config.json").write_text(content)
    with pytest.raises(InputError, match=r"adapter_config\.json"):
        read_folder(folder)
