"""Int8 weights: values computed by hand, the models that use them, their programs."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from prompt_tuning.core import parameter_groups
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Parameters, logical_axes
from prompt_tuning.core.quantization import channel_scale, quantize, scale_path
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


def int8(config):
    return dataclasses.replace(config, parameter_dtype="int8")


def quantized(parameters: Parameters) -> tuple[Parameters, Parameters]:
    """Parameters as an int8 model stores them, and the weights they represent."""
    held, meant = {}, {}
    for path, leaf in parameters.items():
        leaf = np.asarray(leaf)
        if "/layers/" in path and path.endswith("/kernel"):
            scale = channel_scale(leaf)
            held[path], held[scale_path(path)] = quantize(leaf, scale), scale
            meant[path] = held[path].astype(np.float32) * scale[:, None]
        else:
            wide = "/prompt/" in path
            held[path] = leaf if wide else leaf.astype(jnp.bfloat16)
            meant[path] = held[path].astype(jnp.float32)
    return held, meant


def batch_for(config):
    return dummies.make_batch(config, dummies.random_rows([(4, 3), (2, 5)]))


@pytest.mark.parametrize("family", dummies.FAMILIES)
def test_an_int8_model_declares_the_quantized_shapes_and_types(family):
    config = int8(dummies.FAMILIES[family])
    _, parameters = dummies.prompted(dummies.FAMILIES[family])
    held, _ = quantized(parameters)
    _, declared = dummies.prompted(config)
    assert {path: (leaf.shape, leaf.dtype) for path, leaf in declared.items()} == {
        path: (leaf.shape, leaf.dtype) for path, leaf in held.items()
    }
    axes = logical_axes(nnx.eval_shape(lambda: build_model(jax.random.key(0), config)))
    assert axes["decoder/layers/self_attention/query/kernel_scale"].names == (
        "layers",
        "heads",
    )
    assert all(
        len(axes[path].names) == leaf.ndim
        for path, leaf in held.items()
        if path in axes
    )


@pytest.mark.parametrize("family", sample(1, dummies.FAMILIES))
def test_an_int8_model_computes_with_its_dequantized_weights(family):
    config = dummies.FAMILIES[family]
    graph, parameters = dummies.prompted(config)
    narrow, _ = dummies.prompted(int8(config))
    held, meant = quantized(parameters)
    loss, gradient = loss_and_gradient(narrow, held, batch_for(config))
    same_loss, same_gradient = loss_and_gradient(graph, meant, batch_for(config))
    assert loss == pytest.approx(same_loss, rel=1e-5)
    for path, leaf in same_gradient.items():
        assert np.abs(leaf).max() > 1e-3
        np.testing.assert_allclose(gradient[path], leaf, atol=2e-5)
    exact_loss, exact_gradient = float32_outcome(family)
    assert exact_loss != loss == pytest.approx(exact_loss, rel=0.02)
    assert smallest_cosine(gradient, exact_gradient) > 0.99


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
        held, _ = quantized(dummies.prompted(config)[1])
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


@pytest.mark.parametrize(
    ("family", "compute_dtype"), sample(1, [("llama", "float32"), ("gpt2", "bfloat16")])
)
def test_a_step_never_has_a_dequantized_copy_of_a_stack_of_kernels(
    family, compute_dtype
):
    config = dataclasses.replace(
        dummies.FAMILIES[family], layers=5, compute_dtype=compute_dtype
    )
    graph, parameters = dummies.prompted(int8(config))
    trained, frozen = parameter_groups.partition(
        parameters, {path: 0 for path in parameters if "/prompt/" in path}
    )
    step = jax.jit(functools.partial(gradients, graph, key=None))
    text = step.lower(trained, frozen, batch_for(config)).compile().as_text()
    assert text is not None
    kernels = {leaf.shape for leaf in frozen.values() if leaf.dtype == jnp.int8}
    assert kernels
    for shape in kernels:
        sizes = ",".join(map(str, shape))
        assert f"s8[{sizes}]" in text
        assert re.findall(rf"(?:f32|bf16)\[{sizes}\]", text) == []


def test_training_quantized_weights_is_refused():
    _, parameters = dummies.prompted(int8(dummies.LLAMA))
    group = parameter_groups.ParameterGroup(
        [".*/query/kernel", PROMPT], parameter_groups.adamw()
    )
    with pytest.raises(
        InputError,
        match=r"would train 1 int8 parameters \(decoder/layers/self_attention/query"
        r"/kernel\).*--parameter_dtype bfloat16",
    ):
        parameter_groups.label(parameters, [group])


def test_int8_is_only_for_weights():
    with pytest.raises(
        InputError,
        match="compute_dtype is 'int8', expected 'float32' or 'bfloat16'; int8 is for",
    ):
        dataclasses.replace(dummies.LLAMA, compute_dtype="int8")
    with pytest.raises(
        InputError, match=r"'int4', expected .* or 'bfloat16' or 'int8'"
    ):
        dataclasses.replace(dummies.LLAMA, parameter_dtype="int4")
