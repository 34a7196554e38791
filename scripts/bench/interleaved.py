"""Measures the driver with several chunks of each stage against the simulated timeline.

    python -m scripts.bench.interleaved

Every operation of a chunk takes a fixed time, as in `scripts.bench.pipeline`, which
explains the columns. There are as many micro-batches as stages. The cases take turns.
"""

import argparse
import os
import statistics

import jax

from prompt_tuning.pipeline.schedules import Order, stage_orders
from prompt_tuning.pipeline.simulation import OperationCosts
from scripts.bench.pipeline import (
    STAGES,
    EmulatedPipeline,
    StepSeconds,
    compare,
    head,
    longest_chain,
    makespan,
    plain_seconds,
)

SIZES = ((2, 2), (2, 4), (4, 2), (4, 4))
"""Stages, and chunks of each."""
PARTS = ("one", "two")
"""Parts of the backward pass."""
Case = tuple[int, int, str]
"""Stages, chunks of each, and parts of the backward pass."""


def main() -> None:
    """Prints the time of a step for each case, measured and simulated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--unit", type=float, default=0.1, help="seconds of an operation of a chunk"
    )
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", STAGES)
    head(f"stages x chunks, load {os.getloadavg()[0]:.1f}")
    pipelines = {
        sizes: EmulatedPipeline(
            options.unit, sizes[0], stages=sizes[0], virtual=sizes[1]
        )
        for sizes in SIZES
    }
    orders: dict[Case, tuple[Order, ...]] = {
        (stages, virtual, parts): stage_orders(
            "1f1b", stages, stages, parts == "two", virtual=virtual
        )
        for stages, virtual in SIZES
        for parts in PARTS
    }
    seconds: dict[Case, list[StepSeconds]] = {case: [] for case in orders}
    plain: dict[Case, list[float]] = {case: [] for case in orders}
    for _ in range(options.steps):
        for case, order in orders.items():
            seconds[case].append(pipelines[case[:2]].seconds(order))
            plain[case].append(plain_seconds(order, options.unit))
    for case, order in orders.items():
        stages, virtual, parts = case
        times = (
            options.unit * makespan(order, OperationCosts(1, 1, 1)),
            statistics.median(map(sum, seconds[case])),
            statistics.median(plain[case]),
            statistics.median(each.begin + each.finish for each in seconds[case]),
        )
        chain = longest_chain(order, parts == "two")
        compare(f"{stages} x {virtual}", stages, parts, times, chain)


if __name__ == "__main__":
    main()
