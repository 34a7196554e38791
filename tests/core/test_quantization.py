"""Quantized weights: values by hand, the models that use them, their programs."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from prompt_tuning.core import parameter_groups
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Parameters, logical_axes, store_kernel
from prompt_tuning.core.quantization import product
from prompt_tuning.core.quantization.channels import channel_scale, quantize
from prompt_tuning.core.quantization.nibbles import NORMAL_FLOAT, pack, unpack
from prompt_tuning.core.quantization.product import (
    as_float32,
    multiply,
)
from prompt_tuning.core.quantization.stores import (
    INT8,
    NF4,
    STORES,
    Store,
    is_quantized,
    part_path,
    weight_shape,
)
from prompt_tuning.models.build import build_model
from prompt_tuning.training.gradients import gradients
from tests.support import dummies
from tests.support.exhaustive import sample

WEIGHTS = np.array([[1.27, -0.5, 0], [-0.63, 0.3, 0]], np.float32)
PROMPT = r".*/prompt/.*"


def test_a_kernel_equals_a_manual_example():
    scale = channel_scale(WEIGHTS)
    np.testing.assert_allclose(scale, [0.01, 0.5 / 127, 1], rtol=1e-6)
    # 0.3 / (0.5 / 127) = 76.2
    np.testing.assert_array_equal(
        quantize(WEIGHTS, scale), [[127, -127, 0], [-63, 76, 0]]
    )


@pytest.mark.parametrize("dtype", [np.float64, np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("library", [np, jnp])
def test_quantization_changes_weights_by_at_most_half_a_scale(dtype, library):
    random = np.random.default_rng(0)
    drawn = random.standard_normal((3, 40, 7)) * 10.0 ** random.integers(-6, 3, 7)
    weights = library.asarray(drawn.astype(dtype))
    scale = channel_scale(weights)
    kernel = quantize(weights, scale)
    assert (kernel.dtype, scale.dtype, scale.shape) == (np.int8, np.float32, (3, 7))
    assert np.abs(np.asarray(kernel, int)).max(axis=1).min() == 127
    back = np.asarray(kernel, float) * np.asarray(scale, float)[:, None]
    error = np.abs(back - np.asarray(weights).astype(float))
    assert (error <= np.asarray(scale)[:, None] * (0.5 + 1e-4)).all()


def test_numbers_too_small_for_a_scale_become_zero():
    tiny = np.full((2, 1), 1e-45, np.float32)
    assert not quantize(tiny, channel_scale(tiny)).any()


def test_two_weights_are_in_each_byte():
    """Inputs 0 and 2 share a byte, and 1 and 3: the halves of a group of four."""
    weights = np.array([[-7.5, 0.5], [1, 3.75], [0, -3.5], [-5, 3]], np.float32)
    packed, scale = pack(weights)
    np.testing.assert_array_equal(scale, [[1, 0.5]])
    # Codes, the whole multiples plus 8: 0 9 8 3 and 9 15 1 14.
    np.testing.assert_array_equal(packed, [[0x80, 0x19], [0x39, 0xEF]])


@pytest.mark.parametrize("store", ["int4", "nf4"])
@pytest.mark.parametrize("library", [np, jnp])
@pytest.mark.parametrize("shape", [(3, 128, 5), (2, 6, 1), (96, 7)])
def test_packing_rounds_to_the_nearest_value(store, library, shape):
    random = np.random.default_rng(0)
    weights = random.standard_normal(shape).astype(np.float32)
    weights[..., 0] = 0
    table = NORMAL_FLOAT if store == "nf4" else np.arange(-8, 8, dtype=np.float32)
    codebook = NORMAL_FLOAT if store == "nf4" else None
    packed, scale = map(np.asarray, pack(library.asarray(weights), codebook))
    size = 64 if shape[-2] % 64 == 0 else shape[-2] & -shape[-2]
    assert packed.shape == (*shape[:-2], shape[-2] // 2, shape[-1])
    assert scale.shape == (*shape[:-2], shape[-2] // size, shape[-1])
    back = unpacked(packed, scale, codebook)
    wide = np.repeat(scale, size, axis=-2)
    nearest = np.abs(weights[..., None] / wide[..., None] - table).min(-1) * wide
    np.testing.assert_allclose(np.abs(back - weights), nearest, atol=1e-6)
    largest = np.abs(weights.reshape(*shape[:-2], -1, size, shape[-1])).max(-2)
    ends = 7.5 if codebook is None else 1
    np.testing.assert_allclose(scale * ends, np.where(largest, largest, ends), 1e-6)


def unpacked(packed, scale, codebook):
    """The weights of packed kernels, which may be stacked."""
    table = None if codebook is None else jnp.asarray(codebook)
    if packed.ndim == 2:
        return np.asarray(unpack(jnp.asarray(packed), jnp.asarray(scale), table))
    return np.stack(
        [unpacked(*one, codebook) for one in zip(packed, scale, strict=True)]
    )


def test_an_odd_number_of_inputs_is_refused():
    with pytest.raises(InputError, match=r"has 7 inputs.*store the weights in int8"):
        pack(np.ones((7, 2), np.float32))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="CPUs alone widen in parts")
@pytest.mark.parametrize("store", ["bfloat16", INT8, "int4", NF4])
def test_few_rows_are_multiplied_by_parts_of_a_kernel(store, monkeypatch):
    """A product and its gradient are right, and no wide kernel is ever in memory."""
    random = np.random.default_rng(0)
    weights = random.standard_normal((512, 96)).astype(np.float32)
    x = jnp.asarray(random.standard_normal((2, 3, 512)), jnp.float32)
    arrays = store_kernel(
        jnp.asarray(weights), ("in", "out"), Store(store, STORED_GROUPS.get(store))
    )
    held = arrays.stored

    def squares(x, held):
        return (multiply(x, *held) ** 2).sum()

    monkeypatch.setattr(product, "PART", 64 * 96)
    compiled = jax.jit(jax.value_and_grad(squares)).lower(x, held).compile()
    meant = as_float32(*held)
    expected = jax.value_and_grad(lambda x: ((x @ meant) ** 2).sum())(x)
    for actual, same in zip(compiled(x, held), expected, strict=True):
        np.testing.assert_allclose(actual, same, rtol=1e-4, atol=0.05)
    analysis: Any = compiled.memory_analysis()
    assert analysis.temp_size_in_bytes < weights.nbytes


@pytest.mark.parametrize("store", ["int4", NF4])
def test_a_kernel_is_widened_to_the_type_of_the_input(store):
    """The product reads no float32 kernel, which would be written to memory first."""
    weights = jnp.ones((512, 96))
    held = store_kernel(weights, ("in", "out"), Store(store, STORED_GROUPS[store]))
    x = jnp.ones((100, 512), jnp.bfloat16)
    program = jax.jit(multiply).lower(x, *held.stored).as_text()
    (barrier,) = [line for line in program.splitlines() if "barrier" in line]
    assert "tensor<512x96xbf16>" in barrier


STORED_GROUPS = {"int4": 64, NF4: 32}


def in_store(config, store):
    return dataclasses.replace(config, parameter_dtype=store)


def quantized(parameters: Parameters, store: str) -> tuple[Parameters, Parameters]:
    """Parameters as a model stores them, and the weights they represent."""
    held, meant = {}, {}
    for path, leaf in parameters.items():
        leaf = np.asarray(leaf)
        if not ("/layers/" in path and path.endswith("/kernel")):
            wide = "/prompt/" in path
            held[path] = leaf if wide else leaf.astype(jnp.bfloat16)
            meant[path] = held[path].astype(jnp.float32)
        elif store == INT8:
            scale = channel_scale(leaf)
            held[path], held[part_path(path, "scale")] = quantize(leaf, scale), scale
            meant[path] = held[path].astype(np.float32) * scale[:, None]
        else:
            codebook = NORMAL_FLOAT if store == NF4 else None
            held[path], held[part_path(path, "scale")] = pack(leaf, codebook)
            meant[path] = unpacked(held[path], held[part_path(path, "scale")], codebook)
            if codebook is not None:
                held[part_path(path, "codebook")] = np.stack([codebook] * len(leaf))
    return held, meant


def batch_for(config):
    return dummies.make_batch(config, dummies.random_rows([(4, 3), (2, 5)]))


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("family", dummies.FAMILIES)
def test_a_quantized_model_declares_the_shapes_and_types(family, store):
    config = in_store(dummies.FAMILIES[family], store)
    _, parameters = dummies.prompted(dummies.FAMILIES[family])
    held, _ = quantized(parameters, store)
    _, declared = dummies.prompted(config)
    assert {path: (leaf.shape, leaf.dtype) for path, leaf in declared.items()} == {
        path: (leaf.shape, leaf.dtype) for path, leaf in held.items()
    }
    axes = logical_axes(nnx.eval_shape(lambda: build_model(jax.random.key(0), config)))
    scale = axes["decoder/layers/self_attention/query/kernel_scale"].names
    assert scale[-1] == "heads" and len(scale) == (2 if store == INT8 else 3)
    assert all(
        len(axes[path].names) == leaf.ndim
        for path, leaf in held.items()
        if path in axes
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "store"),
    sample(
        3,
        [
            *zip(dummies.FAMILIES, reversed(STORES), strict=False),
            *zip(dummies.FAMILIES, STORES, strict=False),
        ],
    ),
)
def test_a_quantized_model_computes_with_its_dequantized_weights(family, store):
    config = dummies.FAMILIES[family]
    graph, parameters = dummies.prompted(config)
    narrow, _ = dummies.prompted(in_store(config, store))
    held, meant = quantized(parameters, store)
    loss, gradient = loss_and_gradient(narrow, held, batch_for(config))
    same_loss, same_gradient = loss_and_gradient(graph, meant, batch_for(config))
    assert loss == pytest.approx(same_loss, rel=1e-5)
    for path, leaf in same_gradient.items():
        assert np.abs(leaf).max() > 1e-3
        np.testing.assert_allclose(gradient[path], leaf, atol=2e-5)
    exact_loss, exact_gradient = float32_outcome(family)
    assert exact_loss != loss == pytest.approx(exact_loss, rel=0.05)
    assert smallest_cosine(gradient, exact_gradient) > (0.99 if store == INT8 else 0.9)


@pytest.mark.parametrize(
    ("family", "dtype", "compute_dtype"),
    sample(
        1,
        [
            ("llama", "bfloat16", "float32"),
            ("t5_original", "bfloat16", "float32"),
            ("llama", "bfloat16", "bfloat16"),
            ("llama", "int8", "bfloat16"),
        ],
    ),
)
def test_narrow_weights_give_nearly_the_same_prompt_updates(
    family, dtype, compute_dtype
):
    config = dummies.FAMILIES[family]
    choices = {"parameter_dtype": dtype, "compute_dtype": compute_dtype}
    narrow, declared = dummies.prompted(dataclasses.replace(config, **choices))
    held = declared
    if dtype == "int8":
        held, _ = quantized(dummies.prompted(config)[1], dtype)
    loss, gradient = loss_and_gradient(narrow, held, batch_for(config))
    exact_loss, exact_gradient = float32_outcome(family)
    assert exact_loss != loss == pytest.approx(exact_loss, rel=0.02)
    assert all(leaf.dtype == jnp.float32 for leaf in gradient.values())
    assert smallest_cosine(gradient, exact_gradient) > 0.98


def loss_and_gradient(graph, parameters, batch) -> tuple[float, Parameters]:
    """Returns the mean loss of a batch, and the gradient of the prompts."""
    groups = [parameter_groups.ParameterGroup([PROMPT], parameter_groups.adamw())]
    trained, frozen = parameter_groups.partition(
        parameters, parameter_groups.label(parameters, groups)
    )
    run = jax.jit(functools.partial(gradients, graph, key=None))
    gradient, sums = run(trained, frozen, batch)
    return float(sums.loss / sums.weight), gradient


@functools.cache
def float32_outcome(family: str) -> tuple[float, Parameters]:
    """The same with float32 weights."""
    config = dummies.FAMILIES[family]
    return loss_and_gradient(*dummies.prompted(config), batch_for(config))


def smallest_cosine(left: Parameters, right: Parameters) -> float:
    """Returns the smallest cosine between leaves of the same path."""
    return min(
        float(np.vdot(left[path], leaf))
        / float(np.linalg.norm(left[path]) * np.linalg.norm(leaf))
        for path, leaf in right.items()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "store", "compute_dtype"),
    sample(
        2,
        [
            ("llama", "int8", "float32"),
            ("gpt2", "nf4", "bfloat16"),
            ("gpt2", "int8", "bfloat16"),
            ("llama", "int4", "float32"),
        ],
    ),
)
def test_a_step_never_has_a_dequantized_copy_of_a_stack_of_kernels(
    family, store, compute_dtype
):
    config = dataclasses.replace(
        dummies.FAMILIES[family], layers=5, compute_dtype=compute_dtype
    )
    graph, parameters = dummies.prompted(in_store(config, store))
    trained, frozen = parameter_groups.partition(
        parameters, {path: 0 for path in parameters if "/prompt/" in path}
    )
    step = jax.jit(functools.partial(gradients, graph, key=None))
    text = step.lower(trained, frozen, batch_for(config)).compile().as_text()
    assert text is not None
    kernels = {
        leaf.shape: weight_shape(path, leaf)
        for path, leaf in frozen.items()
        if is_quantized(leaf)
    }
    assert kernels
    for shape, wide in kernels.items():
        assert re.search(rf"[su]8\[{','.join(map(str, shape))}\]", text)
        assert re.findall(rf"(?:f32|bf16)\[{','.join(map(str, wide))}\]", text) == []


def test_training_quantized_weights_is_refused():
    _, parameters = dummies.prompted(in_store(dummies.LLAMA, INT8))
    group = parameter_groups.ParameterGroup(
        [".*/query/kernel", PROMPT], parameter_groups.adamw()
    )
    with pytest.raises(
        InputError,
        match=r"would train 1 quantized parameters \(decoder/layers/self_attention"
        r"/query/kernel\).*--parameter_dtype bfloat16",
    ):
        parameter_groups.label(parameters, [group])


def test_int8_is_only_for_weights():
    with pytest.raises(
        InputError,
        match="compute_dtype is 'int8', expected 'float32' or 'bfloat16'; int8 is for",
    ):
        dataclasses.replace(dummies.LLAMA, compute_dtype="int8")
    with pytest.raises(
        InputError, match=r"'int3', expected .* or 'int8' or 'int4' or 'nf4'"
    ):
        dataclasses.replace(dummies.LLAMA, parameter_dtype="int3")
