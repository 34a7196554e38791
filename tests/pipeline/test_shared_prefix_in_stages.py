"""A prompt that all rows share has one copy in each stage, whatever the rows."""

import dataclasses
import math
import re

import jax
import pytest

from prompt_tuning.pipeline.driver import PipelinedGradients
from prompt_tuning.pipeline.schedules import stage_orders
from prompt_tuning.pipeline.stage_devices import StageDevices
from prompt_tuning.settings.prompting import Prompting
from tests.support import dummies

# Primes and powers of two, so that the size of an array tells its dimensions.
ROWS, MICRO_BATCHES, PROMPT, TEXT, WIDTH = 5, 3, 7, 12, 16
CONFIG = dataclasses.replace(
    dummies.LLAMA, layers=2, heads=1, key_value_heads=1, head_width=WIDTH
)


def copies(program) -> set[str]:
    """Returns shapes with a prompt's hidden states, keys or values for every row."""
    found = set()
    for shape in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", program.as_text()):
        size = math.prod(map(int, shape.split(",")))
        alone, with_text = PROMPT * WIDTH, (PROMPT + TEXT) * WIDTH
        for count in (ROWS, MICRO_BATCHES):
            if size % (count * alone) == 0 or size % (count * with_text) == 0:
                found.add(shape)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["shared", "joined"])
def test_no_row_and_no_microbatch_copies_a_shared_prompt(execution):
    """Finds copies only if the prompt is joined to every row, as a control."""
    graph, parameters = dummies.prompted(
        CONFIG, length=PROMPT, prompting=Prompting(execution=execution)
    )
    trained = {path: x for path, x in parameters.items() if "/prompt/" in path}
    frozen = {path: x for path, x in parameters.items() if path not in trained}
    rows = dummies.random_rows([(TEXT - 4, 4)] * (ROWS * MICRO_BATCHES))
    batch = dummies.make_batch(CONFIG, rows)
    batch = jax.tree.map(lambda x: x.reshape(MICRO_BATCHES, ROWS, *x.shape[1:]), batch)
    assert batch.tokens.shape[-1] == TEXT
    stages = [StageDevices(device) for device in jax.devices()[:2]]

    def orders(count, prefix):
        return stage_orders("1f1b", 2, count, False, prefix=prefix)

    pipeline = PipelinedGradients(graph, stages, (1, 1), orders)
    pipeline(trained, frozen, batch, None)
    staged = pipeline.traced(trained, frozen, batch, None)
    assert bool(staged.prefix_programs) == (execution == "shared")
    for own in [*staged.programs, *staged.prefix_programs]:
        for program in (own.forward, own.backward):
            assert bool(copies(program)) == (execution == "joined"), copies(program)
