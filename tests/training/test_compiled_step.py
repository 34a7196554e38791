"""A step that is compiled for each shape, ahead of its use or when it is used."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import monitoring

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.compilation import abstract
from prompt_tuning.core.status_line import show_status
from prompt_tuning.training.step import CompiledStep

COMPILED = "/jax/core/compile/backend_compile_duration"


def batch_of(rows: int, length: int) -> Batch:
    tokens = np.ones((rows, length), np.int32)
    weights = np.ones((rows, 1), np.float32)
    return Batch(tokens, tokens[:, 0], tokens, tokens[:, :1], weights, tokens[:, 0])


def add(state, frozen, batch):
    return state + frozen * batch.tokens.sum(), {}


@pytest.fixture
def compilations():
    """Returns a list that gets the name of each function that is compiled."""
    names = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == COMPILED:
            names.append(kwargs["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    monitoring.unregister_event_duration_listener(listen)


def test_what_was_compiled_ahead_is_not_compiled_again(compilations):
    step, frozen = CompiledStep(add), jnp.float32(2)
    batches = [batch_of(2, 3), batch_of(2, 5)]
    state = jnp.zeros(())
    with ThreadPoolExecutor(1) as executor:
        for batch in batches:
            step.compile_ahead(executor, abstract(state), abstract(frozen), batch)
    ahead = compilations.count("jit(add)")
    for batch in batches:
        state, _ = step(state, frozen, batch)
    assert float(state) == 2 * (6 + 10)
    assert (ahead, compilations.count("jit(add)")) == (2, 2)
    assert step.programs == 2


def test_the_display_counts_the_shapes():
    step, names = CompiledStep(add, shapes=2), []
    state, frozen = jnp.zeros(()), jnp.float32(1)
    with show_status(names.append):
        for length in (3, 3, 5):
            state, _ = step(state, frozen, batch_of(2, length))
    assert names == [
        "compiling shape 1 of 2 (2 x 3)",
        None,
        "compiling shape 2 of 2 (2 x 5)",
        None,
    ]


def test_a_compilation_that_was_canceled_is_done_when_it_is_needed():
    step = CompiledStep(add)
    state, frozen, batch = jnp.zeros(()), jnp.float32(1), batch_of(2, 3)
    with ThreadPoolExecutor(1) as executor:
        waiting = threading.Event()
        executor.submit(waiting.wait)
        step.compile_ahead(executor, abstract(state), abstract(frozen), batch)
        executor.shutdown(wait=False, cancel_futures=True)
        waiting.set()
    state, _ = step(state, frozen, batch)
    assert float(state) == 6


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="CPUs alone widen weights")
def test_a_stack_of_blocks_in_16_bits_is_never_widened_as_a_whole():
    layers, width = 16, 64

    def run(state, frozen, batch):
        rows = jnp.broadcast_to(state, (batch.tokens.size, width))
        last, _ = jax.lax.scan(lambda x, kernel: (x @ kernel, None), rows, frozen)
        return last[0], {}

    kernels = jax.ShapeDtypeStruct((layers, width, width), jnp.bfloat16)
    state = jax.ShapeDtypeStruct((width,), jnp.bfloat16)
    batch = batch_of(8, 3)
    stack = 4 * layers * width * width  # bytes in float32
    program = CompiledStep(run).lower(state, kernels, batch).compile()
    analysis: Any = program.memory_analysis()
    assert 4 * analysis.temp_size_in_bytes < stack
