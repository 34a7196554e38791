import dataclasses
import json

import numpy as np
import pytest
from safetensors import safe_open

from prompt_tuning.checkpoints.formats.safetensors import open_safetensors
from prompt_tuning.checkpoints.stored_tensors import assemble
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_config import ModelConfig, RotaryScaling
from prompt_tuning.core.t5_config import t5_config
from prompt_tuning.families.hf_folder import find_recipes, read_config, write_folder
from tests.support.shared_data import FIXTURES

LLAMA = ModelConfig(
    family="llama",
    architecture="decoder_only",
    vocabulary_size=64,
    width=16,
    feed_forward_width=24,
    layers=3,
    heads=4,
    key_value_heads=2,
    head_width=4,
    norm="rms",
    norm_epsilon=1e-5,
    positions="rotary",
    maximum_positions=64,
    activation="silu",
    gated=True,
    tied_head=False,
)
TIED = dataclasses.replace(LLAMA, tied_head=True, bos_id=2, eos_id=1)
T5 = t5_config(
    width=16,
    feed_forward_width=24,
    layers=2,
    heads=4,
    head_width=6,
    vocabulary_size=64,
)


def attention_shapes(config: ModelConfig, prefix: str, layers: int) -> dict:
    inner = config.heads * config.head_width
    shared = config.key_value_heads * config.head_width
    return {
        f"{prefix}_norm/scale": (layers, config.width),
        f"{prefix}/query/kernel": (layers, config.width, inner),
        f"{prefix}/key/kernel": (layers, config.width, shared),
        f"{prefix}/value/kernel": (layers, config.width, shared),
        f"{prefix}/out/kernel": (layers, inner, config.width),
    }


def stack_shapes(config: ModelConfig, stack: str, layers: int) -> dict:
    wide = (layers, config.width, config.feed_forward_width)
    return {
        **attention_shapes(config, f"{stack}/layers/self_attention", layers),
        f"{stack}/layers/mlp_norm/scale": (layers, config.width),
        f"{stack}/layers/mlp/gate/kernel": wide,
        f"{stack}/layers/mlp/up/kernel": wide,
        f"{stack}/layers/mlp/down/kernel": (layers, *wide[:0:-1]),
        f"{stack}/final_norm/scale": (config.width,),
    }


def random_parameters(config: ModelConfig) -> dict[str, np.ndarray]:
    table = (config.vocabulary_size, config.width)
    shapes = {"token_embedder/embedding": table}
    shapes |= stack_shapes(config, "decoder", config.layers)
    if not config.tied_head:
        shapes["head/kernel"] = table
    if config.encoder_layers:
        shapes |= stack_shapes(config, "encoder", config.encoder_layers)
        cross = "decoder/layers/cross_attention"
        shapes |= attention_shapes(config, cross, config.layers)
        for stack in ("encoder", "decoder"):
            bias = (config.heads, config.relative_buckets)
            shapes[f"{stack}/relative_position_bias/embedding"] = bias
    rng = np.random.default_rng(0)
    return {
        path: rng.standard_normal(shape).astype(np.float32)
        for path, shape in shapes.items()
    }


def tensors(folder) -> dict[str, np.ndarray]:
    with safe_open(folder / "model.safetensors", "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize(
    ("config", "case"), [(LLAMA, "llama_gqa_untied"), (T5, "t5v11_untied_gated")]
)
def test_names_shapes_and_config_equal_those_from_transformers(config, case, tmp_path):
    write_folder(tmp_path, config, random_parameters(config), dtype="float32")
    theirs = FIXTURES / "peft" / case / "base"
    assert {name: x.shape for name, x in tensors(tmp_path).items()} == {
        name: x.shape for name, x in tensors(theirs).items()
    }
    ours = json.loads((tmp_path / "config.json").read_text())
    expected = json.loads((theirs / "config.json").read_text())
    different_on_purpose = {"bos_token_id", "eos_token_id", "dropout_rate"}
    common = (ours.keys() & expected.keys()) - different_on_purpose
    assert {key: ours[key] for key in common} == {key: expected[key] for key in common}


@pytest.mark.parametrize("config", [LLAMA, T5, TIED], ids=["llama", "t5", "tied"])
def test_the_reader_returns_config_and_parameters(config, tmp_path):
    parameters = random_parameters(config)
    write_folder(tmp_path, config, parameters)
    assert read_config(tmp_path) == config
    stored = open_safetensors(tmp_path)
    made_of = find_recipes(config, stored)
    assert made_of.keys() == parameters.keys()
    for path, expected in parameters.items():
        actual = assemble(path, expected.shape, expected.dtype, made_of[path], stored)
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    "case",
    [
        "llama_gqa_untied",
        "qwen2_bias_tied",
        "gpt2_tied",
        "t5v11_untied_gated",
        "t5_orig_tied_relu",
    ],
)
def test_models_of_every_family_are_written_as_they_were_read(case, tmp_path):
    theirs = FIXTURES / "peft" / case / "base"
    config, stored = read_config(theirs), open_safetensors(theirs)
    recipes = find_recipes(config, stored)
    parameters = {}
    for path, recipe in recipes.items():
        layers = [recipe.transform(stored[name].read()) for name in recipe.sources]
        parameters[path] = np.stack(layers) if recipe.stacked else layers[0]
    write_folder(tmp_path, config, parameters)
    assert read_config(tmp_path) == config
    written, expected = tensors(tmp_path), tensors(theirs)
    assert written.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(written[name], array)


def test_rotary_scaling_is_written(tmp_path):
    for number, scaling in enumerate(
        (
            RotaryScaling(factor=4.0),
            RotaryScaling(
                factor=8.0,
                low_frequency_factor=1.0,
                high_frequency_factor=4.0,
                original_positions=64,
            ),
        )
    ):
        config = dataclasses.replace(LLAMA, rotary_scaling=scaling)
        write_folder(tmp_path / str(number), config, random_parameters(config))
        assert read_config(tmp_path / str(number)) == config


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"norm": "layer"}, "llama family cannot express norm = 'layer'"),
        ({"biases": "qkv"}, "llama family cannot express biases = 'qkv'"),
        ({"family": None}, "family is None, expected one of the"),
        ({"family": "mamba3"}, "family is 'mamba3', expected one of"),
    ],
)
def test_models_outside_the_family_are_refused(changes, expected, tmp_path):
    config = dataclasses.replace(LLAMA, **changes)
    with pytest.raises(InputError, match=expected):
        write_folder(tmp_path / "new", config, random_parameters(LLAMA))
    assert not (tmp_path / "new").exists()


def test_linear_kernels_are_transposed_and_layers_unstacked(tmp_path):
    parameters = random_parameters(T5)
    write_folder(tmp_path, T5, parameters, dtype="float32")
    written = tensors(tmp_path)
    np.testing.assert_array_equal(
        written["decoder.block.1.layer.1.EncDecAttention.v.weight"],
        parameters["decoder/layers/cross_attention/value/kernel"][1].T,
    )
    np.testing.assert_array_equal(
        written["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"],
        parameters["encoder/relative_position_bias/embedding"].T,
    )
    np.testing.assert_array_equal(written["lm_head.weight"], parameters["head/kernel"])


def test_bfloat16_halves_the_file(tmp_path):
    wide = dataclasses.replace(LLAMA, feed_forward_width=512)
    parameters = random_parameters(wide)
    for dtype in ("float32", "bfloat16"):
        write_folder(tmp_path / dtype, wide, parameters, dtype=dtype)
    full, half = (
        (tmp_path / dtype / "model.safetensors").stat().st_size
        for dtype in ("float32", "bfloat16")
    )
    assert 0.5 <= half / full < 0.53
    header = (tmp_path / "bfloat16" / "model.safetensors").read_bytes()[:200]
    assert b'"BF16"' in header


def test_a_parameter_without_a_name_is_refused(tmp_path):
    parameters = random_parameters(LLAMA) | {"decoder/prompt/prompt": np.zeros((2, 48))}
    del parameters["decoder/final_norm/scale"]
    with pytest.raises(InputError, match=r"final_norm.*decoder/prompt/prompt"):
        write_folder(tmp_path / "new", LLAMA, parameters, dtype="float32")
    assert not (tmp_path / "new").exists()
