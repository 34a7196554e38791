"""Fields of `config.json` of the wrong type or range."""

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_config import RotaryScaling
from prompt_tuning.core.t5_config import t5_config
from prompt_tuning.families import hf_folder

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA = TOKENS | {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 16,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
}
ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 5e5,
}
QWEN2 = {
    **{name: value for name, value in LLAMA.items() if not name.endswith("_bias")},
    "model_type": "qwen2",
    "layer_types": ["full_attention"],
}
GPT2 = TOKENS | {
    "model_type": "gpt2",
    "n_embd": 8,
    "n_head": 2,
    "n_layer": 1,
    "n_positions": 32,
    "n_inner": 12,
    "vocab_size": 16,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "scale_attn_weights": True,
}
T5 = TOKENS | {
    "model_type": "t5",
    "d_model": 8,
    "d_ff": 12,
    "d_kv": 4,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "num_heads": 2,
    "vocab_size": 16,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "feed_forward_proj": "relu",
    "layer_norm_epsilon": 1e-6,
    "tie_word_embeddings": True,
    "decoder_start_token_id": 0,
}
CONFIGS = {"llama": LLAMA, "qwen2": QWEN2, "gpt2": GPT2, "t5": T5}
GRANITE4 = {
    "model_type": "granitemoehybrid",
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12,
    "eos_token_id": 100257,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "logits_scaling": 3,
    "layer_types": [
        "attention" if i in (10, 13, 17, 27) else "mamba" for i in range(32)
    ],
    "mamba_d_head": 32,
    "mamba_d_state": 128,
    "mamba_n_heads": 48,
    "max_position_embeddings": 32768,
    "num_attention_heads": 12,
    "num_experts_per_tok": 0,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "num_local_experts": 0,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.246,
    "shared_intermediate_size": 2048,
    "vocab_size": 100352,
}
"""Settings of the published Granite 4.0 H 350M."""
WRONG = (
    "8",
    [8],
    {"a": 8},
    10**300,
    -8,
    -1e300,
    float("inf"),
    float("nan"),
    "a" * 5_000_000,
)


def read(folder, config, **generation):
    (folder / "config.json").write_text(json.dumps(config))
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return hf_folder.read_config(folder, tied_head=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
def test_every_field_of_another_type_is_refused_with_file_and_name(family, tmp_path):
    config = CONFIGS[family]
    read(tmp_path, config)
    for name, value in config.items():
        wrong = [*WRONG, 2.5, True]
        if type(value) is bool:
            wrong[-1] = 1
        if type(value) is float:
            wrong.remove(2.5)
        if type(value) is dict:
            wrong.remove({"a": 8})
        if name == "eos_token_id":
            wrong[wrong.index([8])] = [8, "8"]
        for other in wrong:
            with pytest.raises(InputError, match=r"config\.json") as raised:
                read(tmp_path, config | {name: other})
            assert len(str(raised.value)) < 1000
            assert name in str(raised.value) or type(value) is str


@pytest.mark.parametrize("name", ROPE)
@pytest.mark.parametrize("setting", ["rope_scaling", "rope_parameters"])
def test_rotary_scaling_of_another_type_is_refused(setting, name, tmp_path):
    config = {k: v for k, v in LLAMA.items() if k != "rope_scaling"}
    scaling = read(tmp_path, config | {setting: ROPE}).rotary_scaling
    assert isinstance(scaling, RotaryScaling) and scaling.factor == 8
    for other in WRONG:
        with pytest.raises(InputError, match=rf"{setting} in .*config\.json"):
            read(tmp_path, config | {setting: ROPE | {name: other}})


@pytest.mark.parametrize("name", ["longrope", "su"])
def test_positions_end_where_longrope_would_change_its_factors(name, tmp_path):
    scaling = {
        "rope_type": name,
        "short_factor": [1.0, 2.0],
        "long_factor": [3.0, 4.0],
        "original_max_position_embeddings": 16,
    }
    config = read(tmp_path, LLAMA | {"rope_scaling": scaling})
    assert config.maximum_positions == 16
    assert "LongRoPE" in config.positions_note


@pytest.mark.parametrize("name", TOKENS)
def test_token_ids_of_the_generation_config_are_checked(name, tmp_path):
    config = {key: value for key, value in GPT2.items() if key not in TOKENS}
    assert read(tmp_path, config, eos_token_id=3).eos_id == 3
    for other in ("3", [3, "4"], 2.5, 10**300, -2):
        with pytest.raises(InputError, match=rf"generation_config\.json has {name}"):
            read(tmp_path, config, **{name: other})


def test_no_token_is_written_as_minus_one(tmp_path):
    assert read(tmp_path, LLAMA | {"bos_token_id": -1}).bos_id is None


@pytest.mark.parametrize(
    "wrong",
    [
        LLAMA | {"num_attention_heads": 0},
        LLAMA | {"num_key_value_heads": 0},
        LLAMA | {"num_attention_heads": 16, "head_dim": None},
        LLAMA | {"head_dim": 3},
        LLAMA | {"vocab_size": 10**12},
        LLAMA | {"hidden_size": 10**12},
        LLAMA | {"num_hidden_layers": 10**6},
        LLAMA | {"rms_norm_eps": 0},
        LLAMA | {"rope_scaling": ROPE | {"low_freq_factor": 4.0}},
        QWEN2 | {"layer_types": ["sliding_attention"]},
        GPT2 | {"n_head": 3},
        T5 | {"relative_attention_num_buckets": 2},
        T5 | {"relative_attention_max_distance": 16},
    ],
    ids=str,
)
def test_numbers_that_contradict_each_other_are_refused(wrong, tmp_path):
    with pytest.raises(InputError, match=r"config\.json"):
        read(tmp_path, wrong)


@pytest.mark.parametrize(
    ("given", "positions"), [("nope", "none"), (None, "none"), ("rope", "rotary")]
)
def test_granite_4_has_no_positions_unless_it_declares_them(given, positions, tmp_path):
    config = read(tmp_path, GRANITE4 | {"position_embedding_type": given})
    assert config.positions == positions


@pytest.mark.parametrize("least", [10**400, True, float("nan"), -1, None])
def test_a_least_step_out_of_range_is_refused(least, tmp_path):
    limits = {"time_step_limit": [least, float("inf")]}
    with pytest.raises(InputError, match=r"time_step_limit = .*, from 0 to 1, and inf"):
        read(tmp_path, GRANITE4 | limits)


@pytest.mark.parametrize("content", ["[]", "null", "7", '"a"', "[" * 100_000, "", "\0"])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_files_with_another_shape_are_refused(file, content, tmp_path):
    read(tmp_path, GPT2)
    (tmp_path / file).write_text(content)
    with pytest.raises(InputError, match=file):
        hf_folder.read_config(tmp_path, tied_head=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("width", 0),
        ("width", 10**300),
        ("layers", -1),
        ("vocabulary_size", 10**12),
        ("relative_buckets", 0),
        ("eos_id", -1),
        ("norm_epsilon", float("nan")),
    ],
)
def test_a_config_from_python_is_checked(field, value):
    sizes: Any = {"width": 8, "feed_forward_width": 16, "layers": 1, "heads": 2}
    with pytest.raises(InputError, match=rf"ModelConfig\.{field} is"):
        t5_config(**(sizes | {field: value}))


@pytest.mark.slow
def test_types_and_choices_from_python_are_checked_at_run_time():
    wrong = {
        "width": "8",
        "layers": 2.0,
        "heads": True,
        "head_width": None,
        "norm": "batch",
        "positions": 7,
        "rotary_base": "10000",
        "rotary_scaling": 2.0,
        "biases": "some",
    }
    program = f"""
import dataclasses
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.t5_config import t5_config
config = t5_config(width=8, feed_forward_width=16, layers=1, heads=2)
for field, value in {wrong!r}.items():
    try:
        dataclasses.replace(config, **{{field: value}})
    except InputError as error:
        print(field, f"ModelConfig.{{field}} is" in str(error))
"""
    command = [sys.executable, "-c", program]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed.splitlines() == [f"{field} True" for field in wrong]


GPT_NEOX = TOKENS | {
    "model_type": "gpt_neox",
    "hidden_size": 40,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 16,
    "max_position_embeddings": 32,
    "hidden_act": "gelu",
}
GPTJ = {name: value for name, value in GPT2.items() if name != "tie_word_embeddings"}
GPTJ |= {"model_type": "gptj", "tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        # A quarter of 20 elements, without the setting.
        (GPT_NEOX, r"0.25 of each head \(rotary_pct\), which is 5 of its 20 elements"),
        (GPT_NEOX | {"rotary_pct": 0.01}, "0.01 of each head .*, which is 0 of its 20"),
        (
            GPT_NEOX | {"rope_parameters": {"partial_rotary_factor": 0.35}},
            r"0.35 of each head \(partial_rotary_factor\), which is 7 of its 20",
        ),
        (
            GPTJ | {"rotary_dim": 3},
            "rotary_dim = 3, expected an even number up to .* 4",
        ),
        (
            GPTJ | {"rotary_dim": 6},
            "rotary_dim = 6, expected an even number up to .* 4",
        ),
    ],
)
def test_rotated_parts_of_heads_are_refused_by_their_settings(
    config, message, tmp_path
):
    with pytest.raises(InputError, match=message):
        read(tmp_path, config)


MINIMAX = {
    **{name: value for name, value in LLAMA.items() if name != "rope_scaling"},
    "model_type": "minimax",
    "head_dim": 8,
    "num_local_experts": 2,
}


def test_lightning_attention_stands_beside_heads_that_turn_in_part(tmp_path):
    # As MiniMax-Text-01 was trained, according to vLLM.
    assert read(tmp_path, MINIMAX).rotary_width is None
    assert read(tmp_path, MINIMAX | {"rotary_dim": 4}).rotary_width == 4
    with pytest.raises(InputError, match=r"rotary_dim = 10, expected .* 8"):
        read(tmp_path, MINIMAX | {"rotary_dim": 10})


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba"])
def test_the_number_of_channels_of_mamba_takes_precedence(family, tmp_path):
    # As transformers reads them; Falcon Mamba 7B has 16 and 8,192.
    config = {
        "model_type": family,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "vocab_size": 16,
        "tie_word_embeddings": True,
        "expand": 16,
    }
    assert read(tmp_path, config).recurrent_heads == 128
    assert read(tmp_path, config | {"intermediate_size": 16}).recurrent_heads == 16


def test_rotary_positions_need_pairs(tmp_path):
    config = read(tmp_path, LLAMA)
    with pytest.raises(InputError, match="head_width is 3: expected an even head_w"):
        dataclasses.replace(config, head_width=3)
    with pytest.raises(InputError, match="rotary_width is 3: expected an even rotary"):
        dataclasses.replace(config, rotary_width=3)
    with pytest.raises(InputError, match=r"RotaryScaling\.factor is 0"):
        RotaryScaling(factor=0.0)
