"""MXFP4 weights, against the types of `ml_dtypes`."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from prompt_tuning.checkpoints.quantized.methods import open_weights
from prompt_tuning.checkpoints.quantized.mxfp4 import unpack
from prompt_tuning.core.errors import InputError
from prompt_tuning.families.hf_folder import read_config
from prompt_tuning.pretrained.source import open_checkpoint
from prompt_tuning.settings.pretrained import Pretrained

FIXTURE = Path(__file__).parents[1] / "fixtures/families/gpt_oss/base"


def random_packed(experts, rows, columns):
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (experts, rows, columns // 32, 16), np.uint8)
    scales = random.integers(118, 136, blocks.shape[:-1], np.uint8)
    return blocks, scales


def numbers_of(blocks, scales):
    """The same numbers by the types of ml_dtypes, `[E, in, out]`."""
    halves = np.stack([blocks & 15, blocks >> 4], -1).reshape(*scales.shape, 32)
    fours = halves.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    powers = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    return (fours * powers[..., None]).reshape(*scales.shape[:2], -1).swapaxes(1, 2)


def test_all_codes_and_scales_have_the_numbers_of_the_format():
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
    scales = np.array([1, 100, 126, 127, 128, 150, 200, 252] * 2, np.uint8)[None, None]
    actual = unpack(blocks, scales).astype(np.float32).swapaxes(1, 2)
    np.testing.assert_array_equal(actual, numbers_of(blocks, scales))


@pytest.fixture
def folder(tmp_path):
    """A folder of gpt-oss whose experts are packed."""
    folder = Path(shutil.copytree(FIXTURE, tmp_path / "base"))
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj")]:
        del tensors[name]
        rows, columns = (64, 32) if "gate_up" in name else (32, 32)
        packed = random_packed(3, rows, columns)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = packed
    save_file(tensors, folder / "model.safetensors")
    file = folder / "config.json"
    quantized = {"quantization_config": {"quant_method": "mxfp4"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | quantized))
    return folder


def test_packed_experts_are_read_as_arrays_whole_and_in_blocks(folder):
    assert read_config(folder).experts == 3
    stored = open_checkpoint(Pretrained(checkpoint=str(folder)))[2]
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert not any(other.endswith(("_blocks", "_scales")) for other in stored)
    tensor, expected = stored[name], numbers_of(*random_packed(3, 64, 32))
    assert tensor.shape == expected.shape == (3, 32, 64)
    np.testing.assert_array_equal(tensor.read().astype(np.float32), expected)
    part = slice(1, 3), slice(5, 31), slice(2, 9)
    np.testing.assert_array_equal(tensor.read(part).astype("f4"), expected[part])


@pytest.mark.parametrize("scales", [None, np.zeros((3, 64, 2), np.uint8)])
def test_blocks_without_their_scales_are_refused(scales, folder):
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    del tensors[f"{name}_scales"]
    save_file(
        tensors | ({} if scales is None else {f"{name}_scales": scales}),
        folder / "model.safetensors",
    )
    with pytest.raises(InputError, match=rf"{name}_blocks of shape.*{name}_scales"):
        open_weights(folder)


def test_other_methods_of_quantization_are_refused(folder):
    file = folder / "config.json"
    quantized = {"quantization_config": {"quant_method": "hqq"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | quantized))
    with pytest.raises(InputError, match=r"quant_method = 'hqq', expected one of awq"):
        read_config(folder)
