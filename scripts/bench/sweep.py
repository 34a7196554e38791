"""Compares the step of a sweep of prompts, per member, with the step of one run.

    python -m scripts.bench.sweep   # answers `workers` questions

Both steps are the library's, share one copy of the weights, and take turns.
"""

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax

from prompt_tuning.core.batch import Batch
from prompt_tuning.training.sweep_step import compile_sweep_step
from scripts.bench.cases import LLAMA, make_rows
from scripts.bench.llama import open_prompted, write_llama
from scripts.bench.ours import Prepared, make_batch, prepare
from scripts.bench.workers import Answer, serve

MEMBERS = 8
BATCHES = (16, 4)


def main() -> None:
    """Answers questions until standard input ends."""
    serve({"measure": measure})


def measure(rounds: int) -> Answer:
    """Times both steps at each batch size.

    Returns:
      `batches`: by batch size, the median seconds of the `single` step and of the
      `sweep` step, and the median `ratio` of the sweep's time per member to the single
      step's; `programs`: maximum number of programs of a sweep's step; `weight_copies`:
      bytes of its arguments divided by the bytes of the weights.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_llama(Path(folder))
        model = open_prompted(Path(folder), LLAMA.prompt)
        prepared = prepare(model.graph, model.read_parameters())
    programs, copies = [], []
    batches: dict[int, Answer] = {}
    for size in BATCHES:
        batch = make_batch(make_rows(dataclasses.replace(LLAMA, batch=size)))
        single = Stepping(prepared.compile_step(), prepared.start(), prepared, batch)
        step = compile_sweep_step(
            prepared.graph,
            [prepared.optimizer] * MEMBERS,
            own_batches=False,
            dropout=False,
        )
        members = tuple(prepared.start() for _ in range(MEMBERS))
        sweep = Stepping(step, members, prepared, batch)
        turns = [(single(), sweep()) for _ in range(rounds + 2)][2:]
        batches[size] = {
            "single": statistics.median(alone for alone, _ in turns),
            "sweep": statistics.median(together for _, together in turns),
            "ratio": statistics.median(
                together / MEMBERS / alone for alone, together in turns
            ),
        }
        programs.append(sweep.programs())
        copies.append(sweep.argument_bytes() / weight_bytes(prepared))
    return {
        "batches": batches,
        "programs": max(programs),
        "weight_copies": max(copies),
    }


class Stepping:
    """A step and the state that it updates."""

    def __init__(
        self, step: Callable[..., Any], state: Any, prepared: Prepared, batch: Batch
    ):
        self._step, self._state = step, state
        self._frozen, self._batch = prepared.frozen, batch

    def __call__(self) -> float:
        """Runs one step; returns its seconds."""
        started = time.perf_counter()
        self._state, _ = jax.block_until_ready(
            self._step(self._state, self._frozen, self._batch)
        )
        return time.perf_counter() - started

    def programs(self) -> int:
        """Returns the number of compiled programs."""
        return self._step.programs

    def argument_bytes(self) -> int:
        """Returns the bytes of the compiled step's arguments."""
        step = cast(jax.stages.Wrapped, self._step)
        compiled = step.lower(self._state, self._frozen, self._batch).compile()
        memory = cast(Any, compiled.memory_analysis())
        return memory.argument_size_in_bytes


def weight_bytes(prepared: Prepared) -> int:
    """Returns the bytes of the frozen weights."""
    return sum(leaf.nbytes for leaf in prepared.frozen.values())


if __name__ == "__main__":
    main()
