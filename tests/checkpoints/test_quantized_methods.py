"""Quantized tensors, against what the libraries that wrote them make of them.

`scripts/make_quantized_fixtures.py` writes the files of bitsandbytes and
compressed-tensors. GPTQ, AWQ and blocks of float8 are packed here, weight by weight, as
their makers describe.
"""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from prompt_tuning.adapters.merge import write_merged
from prompt_tuning.checkpoints.formats.safetensors import read_header
from prompt_tuning.checkpoints.published_kernel import codes_of
from prompt_tuning.checkpoints.quantized.methods import METHODS, open_weights
from prompt_tuning.checkpoints.stored_tensors import StoredTensor
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.typed_json import as_object
from tests.support.quantized_folders import AWQ_ORDER, packed

FOLDER = Path(__file__).parents[1] / "fixtures/quantized"
FIXTURES = {
    "bitsandbytes_nf4": ("bitsandbytes", 4),
    "bitsandbytes_nf4_nested": ("bitsandbytes", 4),
    "bitsandbytes_fp4": ("bitsandbytes", 4),
    "bitsandbytes_int8": ("bitsandbytes", 8),
    "pack_int4": ("compressed-tensors", 4),
    "pack_int4_zeros": ("compressed-tensors", 4),
    "pack_int8": ("compressed-tensors", 8),
    "float8": ("compressed-tensors", 8),
    "nvfp4": ("compressed-tensors", 4),
}
PART = (slice(3, 11), slice(37, 130))
"""A part that begins and ends within bytes, words and groups."""


def opened(arrays: dict[str, np.ndarray]) -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(array.shape, array.dtype, "/model/file", array.__getitem__)
        for name, array in arrays.items()
    }


def widened(method: str, stored, **settings) -> StoredTensor:
    """The only weight that is left, as a matrix."""
    result = METHODS[method](stored, as_object(settings, "config.json"))
    (name,) = result
    assert name == "m.weight"
    return result[name]


def groups(bits: int) -> dict:
    return {"config_groups": {"group_0": {"weights": {"num_bits": bits}}}}


@pytest.mark.parametrize("name", FIXTURES)
def test_weights_equal_those_of_the_library(name):
    method, bits = FIXTURES[name]
    stored = read_header(FOLDER / f"{name}.safetensors")
    expected = stored.pop("expected").read().astype(np.float32)
    weight = widened(method, stored, **groups(bits))
    # The library rounds to the type of the scales: bfloat16, or float16 for int8.
    tolerance = {"bitsandbytes_int8": 2**-11, "nvfp4": 2**-8}.get(name, 0)
    tolerance = 2**-8 if method == "compressed-tensors" else tolerance
    np.testing.assert_allclose(weight.read(), expected, rtol=tolerance, atol=1e-6)
    np.testing.assert_array_equal(weight.read(PART), weight.read()[PART])
    assert_codes_stand_for(weight)


def assert_codes_stand_for(weight: StoredTensor) -> None:
    """Checks that a store holds what the weight reads as."""
    codes = codes_of(weight)
    assert codes is not None
    values, scales = codes.values.read(), codes.scales.read()
    size = weight.shape[1] // scales.shape[1]
    if codes.nested is not None:
        largest = codes.nested.largest.read().repeat(codes.store.nested or 0, axis=1)
        differences = codes.nested.table[codes.nested.values.read()] * largest
        np.testing.assert_array_equal(differences + codes.nested.table[-1], scales)
    if codes.table is not None:
        wide = codes.table[values]
    elif codes.zeros is not None:
        wide = values.astype("f4") - codes.zeros.read().astype("f4").repeat(size, 1)
    else:
        wide = values.astype("f4") - 8 * codes.store.packed
    meant = wide * scales.astype("f4").repeat(size, 1)
    np.testing.assert_array_equal(meant, weight.read())


def drawn(bits: int):
    """Integers, zero points and scales of 192 inputs, 32 outputs and groups of 64."""
    random = np.random.default_rng(0)
    codes = random.integers(0, 2**bits, (192, 32))
    zeros = random.integers(1, 2**bits, (3, 32))
    scales = random.uniform(0.5, 2, (3, 32)).astype(np.float16)
    return codes, zeros, scales


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq_subtracts_zero_points_by_group(bits, version):
    """The first version stores zero points less one; inputs may be in any order."""
    codes, zeros, scales = drawn(bits)
    group = np.random.default_rng(1).permutation(192) // 64
    expected = (codes - zeros[group]) * scales[group].astype(np.float32)
    arrays = {
        "m.qweight": packed(codes.T, bits).T.copy(),
        "m.qzeros": packed(zeros - (version == "gptq"), bits),
        "m.scales": scales,
        "m.g_idx": group.astype(np.int32),
    }
    settings = {"bits": bits, "checkpoint_format": version}
    weight = widened("gptq", opened(arrays), **settings)
    np.testing.assert_array_equal(weight.read(), expected.T)
    np.testing.assert_array_equal(weight.read(PART), expected.T[PART])
    in_order = arrays | {"m.g_idx": (np.arange(192) // 64).astype(np.int32)}
    weight = widened("gptq", opened(in_order), **settings)
    assert_codes_stand_for(weight)
    plain = (codes - zeros.repeat(64, 0)) * scales.astype(np.float32).repeat(64, 0)
    np.testing.assert_array_equal(weight.read(), plain.T)


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("order", ["shuffled", "in order", "absent"])
def test_groups_of_compressed_tensors_may_be_in_any_order(zero_points, order):
    """Of `actorder: group`; integers have no sign, and -1 means groups in order."""
    codes, zeros, scales = drawn(4)
    zeros = zeros if zero_points else np.full_like(zeros, 8)
    group = np.arange(192) // 64
    if order == "shuffled":
        group = np.random.default_rng(1).permutation(group)
    expected = (codes - zeros[group]) * scales[group].astype(np.float32)
    stored_group = np.full_like(group, -1) if order == "absent" else group
    arrays = {
        "m.weight_packed": packed(codes.T, 4),
        "m.weight_shape": np.array([32, 192]),
        "m.weight_scale": scales.T.copy(),
        "m.weight_g_idx": stored_group.astype(np.int32),
    }
    if zero_points:
        arrays["m.weight_zero_point"] = packed(zeros, 4).T.copy()
    weight = widened("compressed-tensors", opened(arrays), **groups(4))
    np.testing.assert_array_equal(weight.read(), expected.T)
    np.testing.assert_array_equal(weight.read(PART), expected.T[PART])


def test_awq_interleaves_the_outputs():
    """Outputs 0, 2, 4, 6, 1, 3, 5, 7 follow each other in a word."""
    codes, zeros, scales = drawn(4)
    arrays = {
        "m.qweight": packed(codes, 4, AWQ_ORDER),
        "m.qzeros": packed(zeros, 4, AWQ_ORDER),
        "m.scales": scales,
    }
    weight = widened("awq", opened(arrays), bits=4, version="GEMM")
    wide = scales.astype(np.float32).repeat(64, 0)
    expected = ((codes - zeros.repeat(64, 0)) * wide).T
    np.testing.assert_array_equal(weight.read(), expected)
    np.testing.assert_array_equal(weight.read(PART), expected[PART])


def test_float8_is_scaled_by_blocks_of_both_axes():
    random = np.random.default_rng(0)
    weight = random.standard_normal((200, 300)).astype(ml_dtypes.float8_e4m3fn)
    scales = random.uniform(0.5, 2, (2, 3)).astype(np.float32)
    arrays = {"m.weight": weight, "m.weight_scale_inv": scales}
    wide = scales.repeat(128, 0)[:200].repeat(128, 1)[:, :300]
    expected = weight.astype(np.float32) * wide
    read = widened("fp8", opened(arrays), weight_block_size=[128, 128])
    np.testing.assert_array_equal(read.read(), expected)
    part = (slice(120, 140), slice(250, 300))
    np.testing.assert_array_equal(read.read(part), expected[part])
    rows = {"m.weight": weight, "m.weight_scale": scales[:1].repeat(200, 0)[:, :1]}
    by_row = widened("fbgemm_fp8", opened(rows))
    np.testing.assert_array_equal(
        by_row.read(), weight.astype(np.float32) * scales[0, 0]
    )


@pytest.mark.parametrize(
    ("method", "scale", "activations", "settings"),
    [
        # Mistral's, e.g. Ministral 3; AutoFP8's; and ModelOpt's.
        ("fp8", "weight_scale_inv", "activation_scale", {"weight_block_size": None}),
        ("fp8", "weight_scale", "input_scale", {"activation_scheme": "static"}),
        ("modelopt", "weight_scale", "input_scale", {"quant_algo": "FP8"}),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_float8_is_scaled_by_one_number(method, scale, activations, settings, shape):
    random = np.random.default_rng(0)
    weight = random.standard_normal((200, 300)).astype(ml_dtypes.float8_e4m3fn)
    number = np.full(shape, 0.75, np.float32)
    arrays = {"m.weight": weight, f"m.{scale}": number, f"m.{activations}": number}
    read = widened(method, opened(arrays), **settings)
    expected = weight.astype(np.float32) * np.float32(0.75)
    np.testing.assert_array_equal(read.read(), expected)
    np.testing.assert_array_equal(read.read(PART), expected[PART])


def test_a_folder_of_modelopt_may_have_its_settings_in_a_file(tmp_path):
    weight = np.arange(-4, 8).reshape(3, 4).astype(ml_dtypes.float8_e4m3fn)
    scale = np.full((), 0.5, np.float32)
    arrays = {"m.weight": weight, "m.weight_scale": scale}
    save_file(arrays, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    settings = {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    content = {"producer": {"name": "modelopt"}, "quantization": settings}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    read = open_weights(tmp_path)["m.weight"].read()
    np.testing.assert_array_equal(read, np.arange(-4, 8).reshape(3, 4) / 2)
    with pytest.raises(InputError, match=r"hf_quant_config.json .* not quantized"):
        write_merged(tmp_path / "merged", tmp_path, [])


def test_nvfp4_of_modelopt_multiplies_its_two_scales():
    """Compressed-tensors stores the reciprocal of the outer one."""
    stored = read_header(FOLDER / "nvfp4.safetensors")
    del stored["expected"]
    expected = widened("compressed-tensors", stored, **groups(4)).read()
    outer = 1 / stored["m.weight_global_scale"].read().reshape(())
    single = {"m.weight_scale_2": outer, "m.input_scale": np.ones((), np.float32)}
    renamed = {
        "m.weight": stored["m.weight_packed"],
        "m.weight_scale": stored["m.weight_scale"],
        **opened(single),
    }
    weight = widened("modelopt", renamed, quant_algo="NVFP4")
    np.testing.assert_allclose(weight.read(), expected, rtol=1e-6)


def fixture(name: str) -> dict[str, np.ndarray]:
    arrays = load_file(FOLDER / f"{name}.safetensors")
    del arrays["expected"]
    return arrays


@pytest.mark.parametrize(
    ("method", "change", "settings", "message"),
    [
        ("bitsandbytes", {"m.weight.absmax": None}, {}, r"no m\.weight\.absmax"),
        (
            "bitsandbytes",
            {"m.weight": np.zeros((9, 1), np.uint8)},
            {},
            "has 9 codes of",
        ),
        ("gptq", {}, {"bits": 5}, "bits = 5, expected 2, 3, 4 or 8"),
        ("awq", {"m.qweight": np.zeros((8, 1), np.int32)}, {"bits": 4}, "no m.qzeros"),
        (
            "awq",
            {},
            {"bits": 4, "version": "gemv"},
            "version = 'gemv', expected 'gemm'",
        ),
        (
            "modelopt",
            {"m.pre_quant_scale": np.ones(4, np.float32)},
            {"quant_algo": "W4A8_AWQ"},
            "m.pre_quant_scale, which scales the inputs",
        ),
        (
            "fp8",
            {
                "m.weight": np.zeros((4, 4), np.int8),
                "m.weight_scale_inv": np.ones((2, 1), np.float32),
            },
            {},
            r"scales of shape \(2, 1\) for weights of shape \(4, 4\), exp.* \(1, 1\)",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(method, change, settings, message):
    arrays = fixture("bitsandbytes_nf4") | change
    kept = {name: array for name, array in arrays.items() if array is not None}
    with pytest.raises(InputError, match=message):
        METHODS[method](opened(kept), as_object(settings, "config.json"))
