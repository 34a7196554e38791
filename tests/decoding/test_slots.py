"""The compiled step of all slots copies neither weights nor the rows' keys."""

import dataclasses
from collections import Counter

import jax
import numpy as np
import pytest

from prompt_tuning.decoding.resident_adapters import ResidentAdapters
from prompt_tuning.decoding.slot_state import RowStates, Slots
from prompt_tuning.decoding.slots import read_tokens
from scripts.bench import hlo
from tests.support.dummies import LLAMA
from tests.support.engine_models import engine_model

ROWS, LENGTH = 5, 32

needs_cpu = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="arrays share memory on CPUs only"
)


@needs_cpu
def test_a_step_copies_neither_kernels_nor_keys():
    config = dataclasses.replace(LLAMA, feed_forward_width=48, layers=3)
    resident = ResidentAdapters(*engine_model(config, "none"), 8)
    none = np.zeros(ROWS, np.int32)
    pages = np.zeros((ROWS, 0), np.int32)
    rows = RowStates(none, none, np.ones(ROWS, bool), none, pages)
    given = (resident.step_parameters, Slots.create(config, ROWS, LENGTH, 8))
    leaves, trees = zip(*map(jax.tree.flatten, given), strict=True)

    def step(*leaves):
        parameters, slots = map(jax.tree.unflatten, trees, leaves)
        return read_tokens(
            parameters, slots, none, rows, (), graph=resident.graph, sections=1
        )

    program = jax.jit(step, donate_argnums=1).lower(*leaves).compile()
    made = Counter(
        (instruction.kind, shape)
        for instruction in hlo.walk(*_entry(program), 1, inside_fusions=False)
        for _, shape in hlo.result_arrays(instruction.body)
    )
    kernels = {
        leaf.shape[1:]
        for path, leaf in resident.step_parameters.items()
        if path.endswith("/kernel") and "/layers/" in path
    }
    assert {kind for kind, shape in made if shape in kernels} == {"parameter"}
    keys = (config.key_value_heads, ROWS, LENGTH, config.head_width)
    assert made["copy", keys] == 0


def _entry(program):
    computations = hlo.parse(program.as_text())
    return computations, computations["ENTRY"]
