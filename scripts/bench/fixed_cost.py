"""Measures the fixed cost of a step: from Python to the device and back.

    python -m scripts.bench.fixed_cost   # answers `workers` questions

The model is a Llama of 2 layers, width 8 and 16 tokens, whose arithmetic takes a few
microseconds.
"""

import statistics
import tempfile
from pathlib import Path

import numpy as np

from scripts.bench.cases import Rows
from scripts.bench.llama import open_prompted, write_llama
from scripts.bench.ours import make_batch, prepare
from scripts.bench.sweep import Stepping
from scripts.bench.workers import Answer, serve

SHAPE = {
    "vocabulary_size": 16,
    "width": 8,
    "feed_forward_width": 8,
    "layers": 2,
    "heads": 1,
    "key_value_heads": 1,
    "head_width": 8,
}
STEPS_PER_ROUND = 20


def main() -> None:
    """Answers questions until standard input ends."""
    serve({"measure": measure})


def measure(rounds: int) -> Answer:
    """Returns the median `seconds` of a step, of 20 in every round."""
    with tempfile.TemporaryDirectory() as folder:
        write_llama(Path(folder), **SHAPE)
        model = open_prompted(Path(folder), prompt=1)
        prepared = prepare(model.graph, model.read_parameters())
    tokens = np.array([[3, 4]])
    batch = make_batch(Rows(tokens, tokens))
    step = Stepping(prepared.compile_step(), prepared.start(), prepared, batch)
    seconds = [step() for _ in range(STEPS_PER_ROUND * (rounds + 1))]
    return {"seconds": statistics.median(seconds[STEPS_PER_ROUND:])}


if __name__ == "__main__":
    main()
