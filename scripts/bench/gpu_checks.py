"""Checks of the fused kernel on the device, before anything is timed."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prompt_tuning.core.masks import CausalMask
from prompt_tuning.models.attention import AttentionSource, KeyValues, attend
from prompt_tuning.models.flash_attention import attend_fused
from prompt_tuning.models.fused_kernel import FusedKernel
from scripts.bench import plain_kernel
from scripts.bench.gpu_shapes import SMOKE, GpuCase, Shape
from scripts.bench.gpu_step import GpuStep

LIMIT = 0.02
"""Largest difference from float32, relative to the largest number of the array."""
MODEL_LIMIT = 0.06
"""The same for whole models, where both sides round every activation to bfloat16."""
MODEL = Shape(
    family="llama",
    vocabulary=512,
    width=256,
    feed_forward=512,
    layers=2,
    heads=4,
    groups=2,
    head_width=64,
)

PLAIN: Any = plain_kernel  # called with tuples of arguments

Check = dict[str, Any]


def check(
    name: str, actual: Sequence[Any], expected: Sequence[Any], limit: float = LIMIT
) -> Check:
    """Compares arrays; the error is relative to the largest number of each."""
    errors = []
    for a, b in zip(actual, expected, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        errors.append(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-6)))
    # A comparison with NaN is false, so NaN is not within the limit.
    return {"name": name, "error": max(errors), "ok": bool(max(errors) < limit)}


def kernel_checks(kernel: FusedKernel, smoke: bool) -> Iterator[Check]:
    """Compares each pass of the kernel with plain products in float32.

    The backward pass gets the output and the log-sum-exp of a longer row of keys, as
    it does where there are several sources.
    """
    rows, length, prefix, width = (2, 16, 5, 8) if smoke else (4, 384, 100, 128)
    for name, (heads, keys, causal) in {
        "text": (2, length, True),
        "text, heads that share keys": (4, length, True),
        "shared prefix": (1, prefix, False),
        "long shared prefix": (1, 20 * prefix, False),
    }.items():
        many = rows * length if heads == 1 else length
        shapes = [(rows, heads, many, width), *[(rows, keys, width)] * 2]
        random = np.random.default_rng(0)
        drawn = [random.standard_normal(shape) for shape in (*shapes, shapes[0])]
        *arrays, d_output = (jnp.asarray(x, jnp.bfloat16) for x in drawn)
        settings = (width**-0.5, causal)
        exact = [x.astype(jnp.float32) for x in arrays]
        expected = PLAIN.forward(*exact, None, *settings)
        actual = jax.jit(lambda *x, s=settings: kernel.forward(*x, None, *s))(*arrays)
        yield check(f"kernel, {name}: output and sum", actual, expected)
        sums = (0.7 * expected[0], expected[1] + 0.3)
        expected = PLAIN.backward(
            *exact, None, *sums, d_output.astype(jnp.float32), *settings
        )
        backward = jax.jit(
            lambda q, k, v, *x, s=settings: kernel.backward(q, k, v, None, *x, *s)
        )
        output = sums[0].astype(jnp.bfloat16)
        actual = backward(*arrays, output, sums[1], d_output)
        yield check(f"kernel, {name}: gradients", actual, expected)


def attention_checks(kernel: FusedKernel, smoke: bool) -> Iterator[Check]:
    """Compares attention to prefix and text with the reference in float32."""
    groups, rows, heads, length, prefix, width = (
        (2, 3, 2, 16, 5, 8) if smoke else (2, 4, 4, 384, 100, 128)
    )
    random = np.random.default_rng(1)
    shapes = [(groups, rows, heads, length, width), *[(groups, 1, prefix, width)] * 2]
    shapes += [(groups, rows, length, width)] * 2
    drawn = [random.standard_normal(shape) for shape in (*shapes, shapes[0])]
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in drawn]

    def differentiate(fused, *arrays):
        *inputs, cotangent = arrays

        def run(query, *keys_values):
            own = CausalMask() if fused else CausalMask().array(length)
            sources = [
                AttentionSource(KeyValues(*keys_values[:2]), None, None),
                AttentionSource(KeyValues(*keys_values[2:]), own, None),
            ]
            if fused:
                return attend_fused(kernel, query, sources, scale=width**-0.5)
            return attend(query, sources, scale=width**-0.5)

        output, pull_back = jax.vjp(run, *inputs)
        return output, *pull_back(cotangent)

    run = jax.jit(differentiate, static_argnums=0)
    expected = run(False, *(x.astype(jnp.float32) for x in arrays))
    actual = run(True, *arrays)
    yield check("attention to prefix and text: output, gradients", actual, expected)
    again = run(True, *arrays)
    same = all(np.array_equal(a, b) for a, b in zip(actual, again, strict=True))
    yield {"name": "attention: twice the same bits", "error": 0.0, "ok": same}


def family_cases(smoke: bool) -> dict[str, GpuCase]:
    """Returns a small case of every family and method."""
    if smoke:
        return SMOKE
    base = GpuCase(shape=MODEL, method="soft", size=20, rows=4, length=96, learned=32)
    gpt2 = dataclasses.replace(MODEL, family="gpt2", groups=4)
    t5 = dataclasses.replace(gpt2, family="t5")
    with_shape = functools.partial(dataclasses.replace, base)
    return {
        "llama, soft prompt": base,
        "llama, LoRA": with_shape(method="lora", size=8),
        "llama, prefix": with_shape(method="prefix", size=300),
        "gpt2, soft prompt": with_shape(shape=gpt2),
        "t5, soft prompt": with_shape(shape=t5),
    }


def family_checks(smoke: bool) -> Iterator[Check]:
    """Compares a step of every family with the reference, and with itself."""
    for name, case in family_cases(smoke).items():
        dtypes = ("compute_dtype", "parameter_dtype") if smoke else ()
        exact: dict[str, Any] = dict.fromkeys(dtypes, "float32")
        reference = GpuStep(case, "reference", **exact)
        chosen = GpuStep(case, "auto", **exact)
        runs = [step(step.start()) for step in (reference, chosen, chosen)]
        (expected, loss), (actual, same_loss), (again, _) = runs
        # AdamW's first update has the sign of the gradient, so moments are compared.
        moments = _moments(actual), _moments(expected)
        result = check(f"{name}: loss and gradient", *moments, MODEL_LIMIT)
        result["ok"] &= abs(loss - same_loss) < LIMIT * loss
        yield result
        pairs = [(actual.trained[p], again.trained[p]) for p in actual.trained]
        same = all(np.array_equal(a, b) for a, b in pairs)
        yield {"name": f"{name}: twice the same bits", "error": 0.0, "ok": same}


def _moments(state: Any) -> list[jax.Array]:
    """Returns the first moments of AdamW after a step: a tenth of the gradient."""
    leaves = jax.tree.leaves(state.optimizer_state, is_leaf=lambda x: hasattr(x, "mu"))
    return [mu for x in leaves if hasattr(x, "mu") for mu in jax.tree.leaves(x.mu)]
