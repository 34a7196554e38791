"""Settings of `config.json` that folders leave out, or that mean nothing by zero."""

# transformers is only in the `bench` extra.
# pyright: reportMissingImports=false

import json

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.families import FAMILIES
from prompt_tuning.families.default_positions import POSITIONS
from prompt_tuning.families.hf_folder import read_config
from prompt_tuning.families.hf_settings import HuggingFaceSettings

SETTINGS = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 16,
    "max_position_embeddings": 32,
    "sliding_window": 3,
    # Of models with experts, and of those with windows in some layers.
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "use_sliding_window": True,
    "max_window_layers": 0,
}
WINDOWED = ("mistral", "ministral", "phi3", "mixtral", "starcoder2", "qwen2")


def read(model_type, **settings):
    values = HuggingFaceSettings("config.json", SETTINGS | settings)
    return FAMILIES[model_type].read_fields(values)


@pytest.mark.parametrize("model_type", [*WINDOWED, "qwen3_moe", "gemma2"])
def test_a_window_of_zero_is_none(model_type):
    assert 0 in read(model_type)["windowed_layers"]
    assert "windowed_layers" not in read(model_type, sliding_window=0)
    with pytest.raises(InputError, match="sliding_window = -1"):
        read(model_type, sliding_window=-1)


@pytest.mark.parametrize(
    ("model_type", "width"),
    [("qwen3", 128), ("glm4", 128), ("helium", 128), ("gemma", 256), ("gemma2", 256)],
)
def test_a_missing_head_width_is_that_of_transformers(model_type, width):
    assert read(model_type)["head_width"] == width
    assert read(model_type, head_dim=12)["head_width"] == 12


@pytest.mark.torch
@pytest.mark.parametrize("model_type", POSITIONS)
def test_missing_positions_are_those_of_transformers(model_type):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    number = CONFIG_MAPPING[model_type]().max_position_embeddings
    assert POSITIONS[model_type] == number


@pytest.mark.parametrize(("model_type", "number"), [("llama", 2048), ("qwen3", 32768)])
def test_folders_may_leave_out_the_number_of_rotary_positions(
    model_type, number, tmp_path
):
    settings = {**SETTINGS, "model_type": model_type, "max_position_embeddings": None}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = read_config(tmp_path, tied_head=True)
    assert config.maximum_positions == number


def test_gpt_j_has_2048_rotary_positions_by_default():
    """As in transformers' `GPTJConfig`."""
    sizes = {"n_embd": 128, "n_layer": 2, "n_head": 2, "tie_word_embeddings": False}
    assert read("gptj", **sizes)["maximum_positions"] == 2048
    assert read("gptj", **sizes, n_positions=32)["maximum_positions"] == 32
