"""Measures two stages in two processes, each on one core, against the simulation.

    python -m scripts.bench.pipeline --processes

Each operation is measured alone, while the other stage waits. The simulation with
these times is compared with the time in which the operations of a step really run.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from prompt_tuning import processes
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import Parameters, split
from prompt_tuning.models.build import build_model
from prompt_tuning.pipeline.driver import PipelinedGradients
from prompt_tuning.pipeline.schedules import Kind, Order, stage_orders
from prompt_tuning.pipeline.simulation import OperationCosts, simulate
from prompt_tuning.pipeline.stage_devices import StageDevices
from prompt_tuning.processes.group import run_together
from prompt_tuning.processes.process_launch import Launch
from scripts.bench.machine import processor

STAGES, ROWS, LENGTH = 2, 4, 64
MODEL = ModelConfig(
    architecture="decoder_only",
    vocabulary_size=1024,
    width=512,
    feed_forward_width=2048,
    layers=2 * STAGES,
    heads=8,
    key_value_heads=8,
    head_width=64,
    norm="rms",
    positions="rotary",
    maximum_positions=LENGTH,
    activation="silu",
    gated=True,
    tied_head=False,
)
CASES = (
    ("none", 2, False),
    ("none", 2, True),
    ("gpipe", 4, False),
    ("gpipe", 4, True),
    ("1f1b", 4, False),
    ("1f1b", 4, True),
    ("zb-h1", 4, True),
)
"""Schedule, micro-batches, and whether the backward pass has two parts."""
KINDS = (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT, Kind.BACKWARD)


def start(steps: int) -> None:
    """Runs both processes to their ends; the first prints the table."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "scripts.bench.pipeline_processes"]
    choices = ["--port", str(port), "--steps", str(steps)]
    running = [
        subprocess.Popen([*command, "--rank", str(rank), *choices])
        for rank in range(STAGES)
    ]
    if any([process.wait() for process in running]):
        sys.exit("a process failed")


def main() -> None:
    """Joins the other process and measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[options.rank]})
    jax.config.update("jax_num_cpu_devices", 1)
    launch = Launch(f"127.0.0.1:{options.port}", STAGES, options.rank)
    run_together(
        launch,
        lambda: measure(options.rank, options.steps),
        advice="start again",
        ends_on_sigterm=True,
    )


def measure(rank: int, steps: int) -> int:
    """Measures all cases and prints them in the first process; returns 0."""
    pipeline = Stages()
    if rank == 0:
        cores = len(os.sched_getaffinity(0)) * STAGES
        print(f"{processor()}, {cores} cores, load {os.getloadavg()[0]:.1f}")
        print("ms of forward, p1, p2, and p1 and p2 at once, of each stage:")
    alone = pipeline.measure_operations(steps)
    if rank == 0:
        for costs in alone:
            print("  ".join(f"{1000 * costs[kind]:.1f}" for kind in KINDS), flush=True)
        line("schedule", "M", "parts", "simulated", "measured", "", "gain", "bound")
    before: tuple[float, float] | None = None
    for schedule, count, two_stage in CASES:
        orders = stage_orders(schedule, STAGES, count, two_stage)
        measured = statistics.median(
            pipeline.seconds(orders, count) for _ in range(steps)
        )
        expected = simulate(orders, [stage_costs(c, two_stage) for c in alone]).makespan
        gain = ["", ""]
        if two_stage and before is not None:
            gain = [f"{before[0] / measured:.2f}", f"{before[1] / expected:.2f}"]
        before = before if two_stage else (measured, expected)
        if rank == 0:
            line(
                schedule,
                str(count),
                "two" if two_stage else "one",
                f"{1000 * expected:,.0f} ms",
                f"{1000 * measured:,.0f} ms",
                f"{measured / expected - 1:+.1%}",
                *gain,
            )
    return 0


def stage_costs(seconds: dict[str, float], two_stage: bool) -> OperationCosts:
    """Returns the measured times of a stage's operations."""
    if not two_stage:
        return OperationCosts(seconds[Kind.FORWARD], seconds[Kind.BACKWARD], 0.0)
    return OperationCosts(*(seconds[kind] for kind in KINDS[:3]))


def line(*cells: str) -> None:
    """Prints a line of the table at once."""
    print("".join(f"{cell:>11}" for cell in cells), flush=True)


class Stages:
    """A model in two stages, one in each process; all weights are trained."""

    def __init__(self):
        """Builds the model; nothing is compiled yet."""
        graph, parameters = split(build_model(jax.random.key(0), MODEL))
        everywhere = NamedSharding(Mesh(np.array(jax.devices()), "x"), PartitionSpec())
        self._parameters: Parameters = {
            path: jax.make_array_from_callback(
                x.shape, everywhere, lambda index, x=x: np.asarray(x)[index]
            )
            for path, x in parameters.items()
        }
        self._orders: Sequence[Order] = ()
        self._gradients = PipelinedGradients(
            graph,
            [StageDevices(device) for device in jax.devices()],
            [MODEL.layers // STAGES] * STAGES,
            lambda _count, _prefix: self._orders,
        )

    def seconds(self, orders: Sequence[Order], count: int) -> float:
        """Returns the time of a step's operations, of the slower process.

        The parameters' way to the stages and the gradient's way back are not in it.
        """
        self._orders = orders
        step = self._gradients.begin(self._parameters, {}, random_batch(count), None)
        processes.share("ready")
        begin = time.perf_counter()
        self._gradients.run(step)
        seconds = time.perf_counter() - begin
        jax.block_until_ready(self._gradients.finish(step))
        return max(map(float, processes.share(str(seconds))))

    def measure_operations(self, steps: int) -> list[dict[str, float]]:
        """Returns the median time of each operation of each stage, computed alone."""
        cases = [stage_orders("none", STAGES, 2, two) for two in (False, True)]
        for orders in cases:  # compiles everything
            self.seconds(orders, 2)
        (compiled,) = self._gradients._compiled.values()
        programs = compiled.programs[jax.process_index()]
        given = {kind: getattr(programs, kind) for kind in KINDS}
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for kind, program in given.items():
            setattr(programs, kind, timed(program, times[kind]))
        for orders in cases * steps:
            self.seconds(orders, 2)
        for kind, program in given.items():
            setattr(programs, kind, program)
        own = {kind: statistics.median(times[kind]) for kind in KINDS}
        return [json.loads(text) for text in processes.share(json.dumps(own))]


def timed(function: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    """Returns a function that adds its time, from its inputs to its results."""

    def run(*arguments: Any) -> Any:
        jax.block_until_ready(arguments)
        begin = time.perf_counter()
        results = jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - begin)
        return results

    return run


def random_batch(count: int) -> Batch:
    """Returns micro-batches of random tokens; all but the first are learned."""
    shape = (count, ROWS, LENGTH)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, MODEL.vocabulary_size)
    learned = (count, ROWS, LENGTH - 1)
    return Batch(
        tokens=tokens,
        lengths=jax.numpy.full((count, ROWS), LENGTH),
        targets=tokens,
        loss_positions=jax.numpy.broadcast_to(jax.numpy.arange(1, LENGTH), learned),
        loss_weights=jax.numpy.ones(learned),
        prefix_lengths=jax.numpy.ones((count, ROWS), int),
    )


if __name__ == "__main__":
    main()
