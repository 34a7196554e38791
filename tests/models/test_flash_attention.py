"""Attention by a fused kernel equals the reference, in outputs and gradients."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.masks import CausalMask
from prompt_tuning.models import attention_choice, cudnn_attention, splash_attention
from prompt_tuning.models.attention import AttentionSource, KeyValues, attend
from prompt_tuning.models.attention_choice import check_attention, choose_attention
from prompt_tuning.models.build import build_model
from prompt_tuning.models.flash_attention import attend_fused
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.prompts.prefix import KeyValuePrefix
from prompt_tuning.prompts.stack_shape import StackShape
from prompt_tuning.training.gradients import gradients
from scripts.bench import plain_kernel
from tests.support import dummies
from tests.support.exhaustive import sample

G, R, H, Q, K, P = 2, 3, 2, 8, 4, 5
SEGMENTS = np.array(
    [[1, 1, 1, 2, 2, 2, 0, 0], [1] * 8, [1, 2, 3, 3, 3, 4, 4, 0]], np.int32
)
SCALE = 0.5
PLAIN: Any = plain_kernel  # called with tuples of arguments
SPLASH: Any = splash_attention
LIMITS = {"float32": 1e-5, "bfloat16": 3e-2}


def draw(dtype: str) -> list[jax.Array]:
    """Returns a query, a shared prefix, the rows' own keys, and a cotangent."""
    random = np.random.default_rng(0)
    rows, prefix = (G, R, H, Q, K), (G, 1, P, K)
    shapes = (rows, prefix, prefix, (G, R, Q, K), (G, R, Q, K), rows)
    return [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]


def sources_of(arrays, segments, fused):
    mask = CausalMask(segments)
    own = mask if fused else mask.array(Q)
    return [
        AttentionSource(KeyValues(*arrays[0:2]), None, None),
        AttentionSource(KeyValues(*arrays[2:4]), own, None),
    ]


@functools.partial(jax.jit, static_argnames="fused")
def with_gradients(arrays, segments, fused):
    """Returns the output, and the gradients of query and of all keys and values."""
    *inputs, cotangent = arrays

    def run(query, *keys_values):
        sources = sources_of(keys_values, segments, fused)
        if fused:
            return attend_fused(plain_kernel.KERNEL, query, sources, scale=SCALE)
        return attend(query, sources, scale=SCALE)

    output, pull_back = jax.vjp(run, *inputs)
    return output, *pull_back(cotangent)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", LIMITS)
def test_a_merge_of_two_calls_equals_one_softmax(dtype, packed):
    segments = SEGMENTS if packed else None
    arrays = draw(dtype)
    expected = with_gradients(arrays, segments, fused=False)
    actual = with_gradients(arrays, segments, fused=True)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        scale = float(jnp.abs(b).max())
        assert scale > 0.1
        gap = np.abs(np.asarray(a, "f4") - np.asarray(b, "f4")).max()
        assert gap < LIMITS[dtype] * scale
    again = with_gradients(arrays, segments, fused=True)
    for a, b in zip(actual, again, strict=True):
        np.testing.assert_array_equal(a, b)


def test_differentiating_the_merge_of_a_kernel_gives_wrong_gradients():
    """JAX's rule of cuDNN's kernel drops the gradient of the log-sum-exp."""
    *inputs, cotangent = draw("float32")

    @functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
    def kernel(query, keys, values, causal):
        return PLAIN.forward(query, keys, values, None, SCALE, causal)

    def forward(query, keys, values, causal):
        results: Any = kernel(query, keys, values, causal)
        return results, (query, keys, values, *results)

    def backward(causal, saved, cotangents):
        query, keys, values, *results = saved
        return PLAIN.backward(
            query, keys, values, None, *results, cotangents[0], SCALE, causal
        )

    kernel.defvjp(forward, backward)

    def merged(query, *keys_values):
        first, own = (keys_values[:2], keys_values[2:])
        long = query.reshape(G, 1, R * H * Q, K)
        results: Any = [kernel(long, *(x[:, 0] for x in first), False)]
        by_row = query.reshape(G * R, H, Q, K)
        results += [kernel(by_row, *(x.reshape(G * R, Q, K) for x in own), True)]
        outputs = [output.reshape(query.shape) for output, _ in results]
        sums = [log_sum_exp.reshape(query.shape[:-1]) for _, log_sum_exp in results]
        total = jnp.logaddexp(*sums)
        parts = zip(outputs, sums, strict=True)
        return sum(o * jnp.exp(s - total)[..., None] for o, s in parts)

    @jax.jit
    def differentiate(inputs, cotangent):
        output, pull_back = jax.vjp(merged, *inputs)
        return output, pull_back(cotangent)

    output, differentiated = differentiate(inputs, cotangent)
    expected = with_gradients([*inputs, cotangent], None, fused=False)
    np.testing.assert_allclose(output, expected[0], atol=1e-5)
    # Values get the right gradient, query and keys a wrong one.
    np.testing.assert_allclose(differentiated[2], expected[3], atol=1e-5)
    assert np.abs(differentiated[0] - expected[1]).max() > 0.05
    assert np.abs(differentiated[1] - expected[2]).max() > 0.05


def test_the_gpu_program_calls_the_kernel_twice_in_each_direction_without_copies():
    arrays = draw("bfloat16")[:5]

    def loss(query, *keys_values):
        sources = sources_of(keys_values, None, fused=True)
        output = attend_fused(cudnn_attention.KERNEL, query, sources, scale=SCALE)
        return output.astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4))).trace(*arrays)
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert program.count("@__cudnn$fmhaSoftmax(") == 2
    assert program.count("@__cudnn$fmhaSoftmaxBackward(") == 2
    # The prefix keeps its single row: [G, 1, P, K], never one for each of R rows.
    assert f"tensor<{G}x1x{P}x{K}xbf16>" in program
    assert f"x{R}x{P}x{K}x" not in program
    assert f"tensor<{G * R}x1x{P}x{K}x" not in program
    # The backward calls read one log-sum-exp for both sources, reshaped for each.
    assert f"tensor<{G}x1x{R * H * Q}xf32>" in program


@pytest.mark.slow
@pytest.mark.parametrize("causal", sample(1, [True, False]))
def test_splash_attention_equals_plain_products(causal):
    """The TPU kernel, interpreted, with a log-sum-exp that includes another source."""
    random = np.random.default_rng(0)
    q, d_output = (random.standard_normal((1, 2, 20, K)).astype("f4") for _ in range(2))
    keys = 20 if causal else P
    k, v = (random.standard_normal((1, keys, K)).astype("f4") for _ in range(2))
    segments = (np.arange(20, dtype=np.int32) // 7)[None] if causal else None
    arrays = jax.tree.map(jnp.asarray, (q, k, v, segments))
    expected = PLAIN.forward(*arrays, SCALE, causal)
    interpreted = functools.partial(SPLASH.forward, interpret=True)
    for a, b in zip(interpreted(*arrays, SCALE, causal), expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    sums = (0.7 * expected[0], expected[1] + 0.3, jnp.asarray(d_output))
    expected = PLAIN.backward(*arrays, *sums, SCALE, causal)
    interpreted = functools.partial(SPLASH.backward, interpret=True)
    for a, b in zip(interpreted(*arrays, *sums, SCALE, causal), expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


BFLOAT16 = dataclasses.replace(dummies.LLAMA, compute_dtype="bfloat16", head_width=8)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BFLOAT16, "no fused kernel for the platform 'cpu': use a GPU or a TPU"),
        (dummies.T5_GATED, "T5 adds a bias .*: use a decoder-only model"),
        (
            dummies.with_dropout(BFLOAT16),
            "dropout_rate is 0.3.*give --gin.Pretrained.dropout_rate=0",
        ),
    ],
)
def test_flash_where_it_is_impossible_is_an_error_with_the_reason(config, message):
    assert choose_attention(config).kernel is None
    check_attention(config)
    demanded = dataclasses.replace(config, attention="flash")
    with pytest.raises(
        InputError, match=rf"'flash', but .*{message}.*--attention auto"
    ):
        check_attention(demanded)


def test_cudnn_refuses_models_before_it_looks_for_a_gpu():
    wide = dataclasses.replace(BFLOAT16, head_width=264)
    for config, reason in (
        (dummies.LLAMA, "compute_dtype is 'float32'"),
        (dataclasses.replace(BFLOAT16, head_width=12), "width 12"),
        (wide, "width 264"),
        (BFLOAT16, "cuDNN is not installed"),
    ):
        obstacle = cudnn_attention.obstacle(config)
        assert obstacle is not None and reason in obstacle.reason


class Spy:
    """Counts the calls of the plain kernel."""

    def __init__(self):
        self.calls = 0
        self.kernel = plain_kernel.KERNEL._replace(forward=self.forward)

    def forward(self, *arguments):
        self.calls += 1
        return PLAIN.forward(*arguments)


@pytest.fixture
def spy(monkeypatch):
    spy = Spy()
    monkeypatch.setitem(attention_choice.KERNELS, "cpu", lambda: spy.kernel)
    return spy


def outcome(config, kind, batch):
    """Returns a batch's sums, and the gradient of the prompt or the prefix."""
    if kind == "soft":
        graph, parameters = dummies.prompted(config)
    else:
        table = np.zeros((dummies.V, config.width), "f4")
        vocabulary = Vocabulary(
            table,
            stack=StackShape(config.layers, config.key_value_heads, config.head_width),
        )

        def build(key):
            prefix = KeyValuePrefix(key, vocabulary, length=dummies.P)
            return build_model(key, config, prefix)

        graph, parameters = dummies.with_numbers(build)
    trained = {p: x for p, x in parameters.items() if "/prompt/" in p}
    frozen = {p: x for p, x in parameters.items() if "/prompt/" not in p}
    compute = jax.jit(gradients, static_argnums=0)
    return compute(graph, trained, frozen, batch, None)


def packed_batch() -> Batch:
    """Returns two rows, the first of which has two examples."""
    tokens = np.array([[3, 4, 5, 6, 7, 8, 0], [9, 8, 7, 6, 5, 4, 3]], np.int32)
    return Batch(
        tokens=tokens,
        lengths=np.array([6, 7], np.int32),
        targets=tokens,
        loss_positions=np.array([[1, 2, 4, 5], [3, 4, 5, 6]], np.int32),
        loss_weights=np.ones((2, 4), np.float32),
        prefix_lengths=np.array([[1, 1], [3, 0]], np.int32),
        segment_ids=np.array([[1, 1, 1, 2, 2, 2, 0], [1] * 7], np.int32),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind", "packed"),
    [("llama", "soft", False), ("llama", "prefix", True), ("gpt2", "soft", True)],
)
def test_models_compute_the_same_with_a_kernel(spy, family, kind, packed):
    config = dummies.FAMILIES[family]
    ragged = dummies.make_batch(config, dummies.random_rows([(4, 3), (2, 5), (3, 1)]))
    batch = packed_batch() if packed else ragged
    plain = dataclasses.replace(config, attention="reference")
    expected_gradient, expected = outcome(plain, kind, batch)
    assert not spy.calls
    flash = dataclasses.replace(config, attention="flash")
    gradient, sums = outcome(flash, kind, batch)
    assert spy.calls
    np.testing.assert_allclose(sums.loss, expected.loss, rtol=1e-5)
    assert gradient
    for path, leaf in gradient.items():
        assert np.abs(leaf).max() > 1e-3
        np.testing.assert_allclose(leaf, expected_gradient[path], atol=2e-5)
