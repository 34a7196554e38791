"""Kernels that are packed in four bits on reading, whole and in parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.checkpoints.quantized_kernel import TILE_COLUMNS, TILE_ROWS
from prompt_tuning.checkpoints.restore_plan import plan_restore
from prompt_tuning.checkpoints.stored_tensors import StoredTensor, layered, transpose
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.quantization.nibbles import NORMAL_FLOAT, pack

L, GROUP = 2, 64
IN, OUT = TILE_ROWS + 2 * GROUP, TILE_COLUMNS + 3  # more than one tile along each axis
KERNEL = "layers/kernel"
RECIPES = {KERNEL: layered("{}.w", L, transpose)}
INT4 = {
    KERNEL: jax.ShapeDtypeStruct((L, IN // 2, OUT), jnp.uint8),
    f"{KERNEL}_scale": jax.ShapeDtypeStruct((L, IN // GROUP, OUT), jnp.float32),
}
NF4 = INT4 | {f"{KERNEL}_codebook": jax.ShapeDtypeStruct((L, 16), jnp.float32)}


def arrays() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {f"{i}.w": random.standard_normal((OUT, IN), "f4") for i in range(L)}


def plan(stored: dict[str, np.ndarray], model):
    tensors = {
        name: StoredTensor(array.shape, array.dtype, "/ckpt/file", array.__getitem__)
        for name, array in stored.items()
    }
    return plan_restore(model, RECIPES, tensors)


def packed(stored: dict[str, np.ndarray], codebook):
    weights = np.stack([array.T for array in stored.values()])
    return pack(weights, codebook)


@pytest.mark.parametrize(
    ("model", "codebook"), [(INT4, None), (NF4, NORMAL_FLOAT)], ids=["int4", "nf4"]
)
def test_a_kernel_is_packed_by_layer(model, codebook):
    stored = arrays()
    restore_plan = plan(stored, model)
    restored = restore_plan.restore()
    kernel, scale = packed(stored, codebook)
    np.testing.assert_array_equal(restored[KERNEL], kernel)
    np.testing.assert_array_equal(restored[f"{KERNEL}_scale"], scale)
    assert list(restored) == list(model)
    if codebook is not None:
        tables = np.stack([codebook] * L)
        np.testing.assert_array_equal(restored[f"{KERNEL}_codebook"], tables)
    name = "int4" if codebook is None else "nf4"
    assert f"{name} " in restore_plan.report()


def test_parts_need_not_begin_at_a_group():
    stored = arrays()
    kernel, scale = packed(stored, None)
    readers = dict(plan(stored, INT4).readers())
    rows = slice(GROUP // 2 + 5, 2 * GROUP + 1)
    parts = [(slice(1, 2), rows, slice(7, 20)), (slice(0, 2), slice(0, 3), slice(0, 1))]
    for read, part in zip(readers[KERNEL](parts), parts, strict=True):
        np.testing.assert_array_equal(read, kernel[part])
    # Scales that no block of the kernel needed.
    part = (slice(0, 2), slice(3, 5), slice(2, OUT))
    (read,) = readers[f"{KERNEL}_scale"]([part])
    np.testing.assert_array_equal(read, scale[part])


def test_weights_that_are_not_finite_are_refused():
    stored = arrays()
    stored["1.w"][3, 4] = np.nan
    with pytest.raises(InputError, match=r"kernel: 1\.w in /ckpt/file contains num"):
        plan(stored, INT4).restore()
