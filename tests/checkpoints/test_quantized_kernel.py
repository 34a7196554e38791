"""Kernels that are quantized on reading, and the plan's report of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.checkpoints.restore_plan import plan_restore
from prompt_tuning.checkpoints.stored_tensors import StoredTensor, layered, transpose
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.quantization.channels import channel_scale, quantize

L, IN, OUT = 2, 150, 130  # more than one tile along each axis
PATHS = ("layers/kernel", "layers/kernel_scale", "layers/bias")
RECIPES = {
    "layers/kernel": layered("{}.w", L, transpose),
    "layers/bias": layered("{}.b", L),
}
MODEL = {
    "layers/kernel": jax.ShapeDtypeStruct((L, IN, OUT), jnp.int8),
    "layers/kernel_scale": jax.ShapeDtypeStruct((L, OUT), jnp.float32),
    "layers/bias": jax.ShapeDtypeStruct((L, OUT), jnp.bfloat16),
}


def arrays() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    drawn = {f"{i}.w": random.standard_normal((OUT, IN), "f4") for i in range(L)}
    return drawn | {f"{i}.b": random.standard_normal(OUT, "f4") for i in range(L)}


def plan(stored: dict[str, np.ndarray], model=MODEL, **choices):
    tensors = {
        name: StoredTensor(array.shape, array.dtype, "/ckpt/file", array.__getitem__)
        for name, array in stored.items()
    }
    return plan_restore(model, RECIPES, tensors, **choices)


def test_a_kernel_is_quantized_by_layer_and_returned_with_its_scales():
    stored = arrays()
    restored = plan(stored).restore()
    assert set(restored) == set(PATHS)
    for layer in range(L):
        weights = stored[f"{layer}.w"].T
        scale = channel_scale(weights)
        np.testing.assert_array_equal(restored["layers/kernel_scale"][layer], scale)
        np.testing.assert_array_equal(
            restored["layers/kernel"][layer], quantize(weights, scale)
        )
    assert {path: array.dtype for path, array in restored.items()} == {
        path: leaf.dtype for path, leaf in MODEL.items()
    }


def test_the_report_lists_quantized_kernels():
    kernel, scales, bias = L * IN * OUT, L * OUT, L * OUT
    rows = [line.split() for line in plan(arrays()).report().splitlines()]
    total = f"{kernel + scales + bias:,}", f"{kernel + 4 * scales + 2 * bias:,}"
    assert rows[2][:4] == ["restored", "3", *total]
    assert rows[3][:5] == ["int8", "1", f"{kernel:,}", f"{kernel:,}", "of"]
    assert "int8" not in plan(arrays(), {"layers/bias": MODEL["layers/bias"]}).report()


def test_the_scales_are_handled_with_their_kernel():
    restore_plan = plan(arrays(), assignment_map=((".*/kernel", None),))
    assert set(restore_plan.fresh) == set(PATHS[:2])
    assert set(restore_plan.restore()) == {"layers/bias"}
    with pytest.raises(InputError, match="kernel_scale' matches no complete path"):
        plan(arrays(), assignment_map=((".*/kernel_scale", None),))


def test_a_missing_layer_is_named_once():
    stored = arrays()
    del stored["1.w"]
    with pytest.raises(InputError, match=r"lacks 1 more:\n  layers/kernel needs 1\.w"):
        plan(stored)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(number):
    stored = arrays()
    stored["1.w"][3, 4] = number
    with pytest.raises(
        InputError, match=r"layers/kernel: 1\.w in /ckpt/file contains num"
    ):
        plan(stored).restore()


def test_jax_uses_arrays_from_files_without_a_copy():
    for array in plan(arrays()).restore().values():
        taken = jax.device_put(array, jax.devices("cpu")[0])
        assert taken.unsafe_buffer_pointer() == array.ctypes.data
