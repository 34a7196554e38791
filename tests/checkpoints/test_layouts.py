"""Quantized weights as other libraries store them, and the files around them."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from prompt_tuning.checkpoints.formats.safetensors import (
    Entry,
    write_safetensors,
)
from prompt_tuning.checkpoints.quantized.layouts import Rounding, make_layout
from prompt_tuning.checkpoints.stored_tensors import StoredTensor
from prompt_tuning.core.errors import InputError
from tests.checkpoints.test_quantized_methods import FOLDER


def written(
    weight: np.ndarray, file: Path, store: str, group: int | None
) -> tuple[dict[str, np.ndarray], Rounding]:
    """Writes a weight; returns what the safetensors library reads."""
    stored = StoredTensor(weight.shape, weight.dtype, "/base", weight.__getitem__)
    rounding = Rounding()
    entries = make_layout(store, group).entries("m.weight", stored, rounding)
    write_safetensors(file, entries, lambda count: None)
    return load_file(file), rounding


def test_nf4_equals_the_bytes_of_bitsandbytes(tmp_path):
    """Rounding the weights to which it widens them again changes nothing."""
    theirs = load_file(FOLDER / "bitsandbytes_nf4.safetensors")
    weight = theirs.pop("expected").astype(np.float32)
    ours, rounding = written(weight, tmp_path / "file.safetensors", "nf4", 64)
    assert rounding.relative == 0
    assert ours.keys() == theirs.keys()
    for name in ("m.weight", "m.weight.absmax", "m.weight.quant_map"):
        np.testing.assert_array_equal(ours[name].ravel(), theirs[name].ravel())


@pytest.mark.parametrize(("store", "bits"), [("int4", 4), ("int8", 8)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(3, 40), (5, 64)])
def test_integers_are_as_near_as_their_scales_allow(
    store, bits, dtype, shape, tmp_path
):
    weight = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    weight[1] = 0
    group = 8 if store == "int4" else None
    file, group = tmp_path / "file.safetensors", group
    arrays, rounding = written(weight, file, store, group)
    scale = arrays["m.weight_scale"].astype(float)
    wide = weight.astype(float)
    grouped = wide.reshape(shape[0], -1, group or shape[1])
    expected = np.abs(grouped).max(-1) / ((2**bits - 1) / 2)
    np.testing.assert_allclose(scale[[0, 2]], expected[[0, 2]], rtol=2**-8)
    words = arrays["m.weight_packed"].view(np.uint32)
    shifts = np.arange(0, 32, bits)
    codes = (words[..., None] >> shifts & (2**bits - 1)).reshape(shape[0], -1)
    integers = codes[:, : shape[1]].astype(float) - 2 ** (bits - 1)
    back = integers.reshape(grouped.shape) * scale[..., None]
    assert (np.abs(back - grouped) <= 0.55 * scale[..., None]).all()
    change = np.linalg.norm(back - grouped) / np.linalg.norm(grouped)
    assert rounding.relative == pytest.approx(change, rel=1e-3)
    np.testing.assert_array_equal(arrays["m.weight_shape"], shape)


def test_arrays_of_odd_sizes_begin_where_their_type_requires(tmp_path):
    arrays = {
        "odd": np.arange(3, dtype=np.uint8),
        "wide": np.arange(3, dtype=np.float32),
        "half": np.arange(3, dtype=np.float32).astype(ml_dtypes.bfloat16),
        "none": np.array(2.0),
    }
    entries = [
        Entry(name, x.dtype, x.shape, lambda x=x: [x]) for name, x in arrays.items()
    ]
    file, counts = tmp_path / "file.safetensors", []
    write_safetensors(file, entries, counts.append)
    assert sum(counts) == sum(x.nbytes for x in arrays.values())
    for name, array in load_file(file).items():
        np.testing.assert_array_equal(array, arrays[name])


@pytest.mark.parametrize(
    ("store", "group", "message"),
    [
        ("nf4", 32, "--group is 32, expected one of 64, 128"),
        ("int4", 48, "has 192 inputs"),
    ],
)
def test_groups_that_the_libraries_do_not_read_are_refused(
    store, group, message, tmp_path
):
    weight = np.ones((2, 192 if group == 32 else 200), np.float32)
    with pytest.raises(InputError, match=message.replace("192", "200")):
        written(weight, tmp_path / "file.safetensors", store, group)
