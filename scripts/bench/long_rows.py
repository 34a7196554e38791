"""Measures the memory of one training step of long rows, in a process for each length.

    python -m scripts.bench.long_rows 2048   # answers `workers` questions

A Llama of 4 layers and width 512 trains 100 prompt vectors on 2 rows, with loss on the
last 8 tokens, so that memory shows attention and blocks rather than the head.
"""

import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import jax

from scripts.bench.cases import LLAMA, make_rows
from scripts.bench.llama import open_prompted, write_llama
from scripts.bench.ours import make_batch, prepare
from scripts.bench.workers import Answer, peak_memory, serve

LAYERS, ROWS = 4, 2


def main() -> None:
    """Answers questions until standard input ends."""
    length = int(sys.argv[1])
    serve({"measure": lambda: measure(length)})


def measure(length: int) -> Answer:
    """Runs one step of rows of a length.

    Returns:
      `process`: peak memory of this process in bytes; `arguments` and `temporary`: the
      compiler's bytes of the step's arguments, and of all its other arrays at once.
    """
    with tempfile.TemporaryDirectory() as folder:
        positions = LLAMA.prompt + length
        write_llama(Path(folder), layers=LAYERS, maximum_positions=positions)
        model = open_prompted(Path(folder), LLAMA.prompt)
        prepared = prepare(model.graph, model.read_parameters())
    case = dataclasses.replace(LLAMA, batch=ROWS, length=length)
    state, batch = prepared.start(), make_batch(make_rows(case))
    step = prepared.compile_step()
    lowered = cast(jax.stages.Wrapped, step).lower(state, prepared.frozen, batch)
    memory = cast(Any, lowered.compile().memory_analysis())
    jax.block_until_ready(step(state, prepared.frozen, batch))
    return {
        "process": peak_memory()["bytes"],
        "arguments": memory.argument_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
    }


if __name__ == "__main__":
    main()
