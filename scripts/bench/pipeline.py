"""Measures the driver of pipelines against the simulated timeline.

    python -m scripts.bench.pipeline [--processes]

Every operation of four stages takes a fixed time: after its inputs have arrived, its
thread computes a tiny model's operation and waits until that time is over. What exceeds
the simulation is the time of the driver. "step" is the part of it that a step takes
once: starting it and joining its gradients, which emulated devices do slowly.
"operation" is the rest, divided by the operations of the longest chain. The members of
a sweep are compared with stages that never wait. `scripts.bench.interleaved` measures
several chunks of each stage.

The column "threads" is the same timeline in plain threads, which wait for events and
compute nothing. What it exceeds the simulation by is the machine's own: its timer and
its scheduler, and is not in "operation".
"""

import argparse
import dataclasses
import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import split
from prompt_tuning.models.build import build_model
from prompt_tuning.pipeline.driver import PipelinedGradients, StepInStages
from prompt_tuning.pipeline.member_driver import MemberPipeline, MemberStep
from prompt_tuning.pipeline.member_orders import MemberOrders
from prompt_tuning.pipeline.schedules import (
    Order,
    chunk_count,
    needed_results,
    result_of,
    stage_orders,
)
from prompt_tuning.pipeline.simulation import OperationCosts, simulate
from prompt_tuning.pipeline.stage_devices import StageDevices
from scripts.bench import pipeline_processes

STAGES = 4
MODEL = ModelConfig(
    architecture="decoder_only",
    vocabulary_size=32,
    width=16,
    feed_forward_width=32,
    layers=STAGES,
    heads=2,
    key_value_heads=2,
    head_width=8,
    norm="rms",
    positions="rotary",
    maximum_positions=64,
    activation="silu",
    gated=True,
    tied_head=False,
)
CASES = (
    ("none", 1, False),
    ("none", 1, True),
    ("gpipe", 4, False),
    ("gpipe", 4, True),
    ("1f1b", 4, False),
    ("1f1b", 4, True),
    ("1f1b-2", 8, False),
    ("1f1b-2", 8, True),
    ("zb-h1", 8, True),
)
"""Schedule, micro-batches, and whether the backward pass has two parts."""
MEMBERS = ((4, 1), (4, 2), (8, 1))
"""Members of a sweep, and micro-batches of each one's step."""
UNITS = {"forward": 1, "input_gradient": 1, "weight_gradient": 1, "backward": 2}
"""Emulated time of each operation."""
LAST_PART, SHORT_WAIT = 2e-3, 1e-4
"""Seconds before the end of an operation in which its thread looks at the clock more
often, and how often."""


def main() -> None:
    """Prints the time of a step under each schedule, measured and simulated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--unit", type=float, default=0.1, help="seconds of an operation"
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--processes",
        action="store_true",
        help="measure two stages in two processes, each on one core, without emulation",
    )
    options = parser.parse_args()
    if options.processes:
        pipeline_processes.start(options.steps)
        return
    jax.config.update("jax_num_cpu_devices", STAGES)
    head(f"{STAGES} stages, load {os.getloadavg()[0]:.1f}")
    pipelines = {}
    for schedule, count, two_stage in CASES:
        orders = stage_orders(schedule, STAGES, count, two_stage)
        expected = options.unit * makespan(orders, OperationCosts(1, 1, 1))
        if count not in pipelines:
            pipelines[count] = EmulatedPipeline(options.unit, count)
        measured, once, plain = [], [], []
        for _ in range(options.steps):
            seconds = pipelines[count].seconds(orders)
            measured.append(sum(seconds))
            once.append(seconds.begin + seconds.finish)
            plain.append(plain_seconds(orders, options.unit))
        parts = "two" if two_stage else "one"
        times = expected, *map(statistics.median, (measured, plain, once))
        compare(schedule, count, parts, times, longest_chain(orders, two_stage))
    for members, count in MEMBERS:
        step = EmulatedMembers(options.unit, members, count)
        # F and a backward pass in one part of twice its time.
        times = 3 * count * options.unit, step.seconds(4 * options.steps)
        compare(f"{members} members", count, "one", times)


def head(title: str) -> None:
    """Prints a title and the names of the columns."""
    print(title)
    print("threads: the same in threads that only wait; step: starting a step and")
    print("joining its gradients; operation: what each one of the longest chain adds")
    line(
        *("schedule", "M", "parts", "simulated", "measured", "", "threads", ""),
        *("step", "operation"),
    )


def compare(
    name: str, count: int, parts: str, times: Sequence[float], operations: int = 0
) -> None:
    """Prints the times of a step.

    They are simulated, measured, and if known in plain threads and outside operations.
    """
    expected, measured, *known = times
    shown = []
    if known:
        plain, once = known
        added = (measured - once - plain) / operations
        shown = [
            f"{1000 * plain:,.0f} ms",
            f"{plain / expected - 1:+.1%}",
            f"{1000 * once:.1f} ms",
            f"{1000 * added:.2f} ms",
        ]
    line(
        name,
        str(count),
        parts,
        f"{1000 * expected:,.0f} ms",
        f"{1000 * measured:,.0f} ms",
        f"{measured / expected - 1:+.1%}",
        *shown,
    )


def longest_chain(orders: Sequence[Order], two_stage: bool) -> int:
    """Returns the number of operations that determine the time of a step."""
    added = 1e-6
    costs = OperationCosts(1 + added, 1 + added, 1 + added * two_stage)
    return round(
        (makespan(orders, costs) - makespan(orders, OperationCosts(1, 1, 1))) / added
    )


def makespan(orders: Sequence[Order], costs: OperationCosts) -> float:
    """Returns the simulated time of a step whose stages cost the same."""
    return simulate(orders, [costs] * len(orders) * chunk_count(orders)).makespan


def line(*cells: str) -> None:
    """Prints a line of the table at once."""
    print("".join(f"{cell:>10}" for cell in cells), flush=True)


def wait_until(deadline: float) -> None:
    """Waits until a time of `time.perf_counter`.

    The last part consists of short waits, because a timer may be late by a share of
    what it waits for.
    """
    while (left := deadline - time.perf_counter()) > 0:
        time.sleep(left - LAST_PART if left > 2 * LAST_PART else SHORT_WAIT)


def plain_seconds(orders: Sequence[Order], unit: float) -> float:
    """Returns the time of the operations in plain threads that only wait."""
    ended = {
        result_of(stage, operation): threading.Event()
        for stage, order in enumerate(orders)
        for operation in order
    }

    chunks = chunk_count(orders)

    def work(stage: int) -> None:
        for operation in orders[stage]:
            for needed in needed_results(stage, operation, orders, chunks):
                ended[needed].wait()
            wait_until(time.perf_counter() + unit * UNITS[operation.kind])
            ended[result_of(stage, operation)].set()

    threads = [threading.Thread(target=work, args=(s,)) for s in range(len(orders))]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


class StepSeconds(NamedTuple):
    """Times of the parts of a step in seconds."""

    begin: float
    run: float
    finish: float


class EmulatedPipeline:
    """A tiny model in stages, whose operations take a fixed time."""

    def __init__(
        self,
        unit: float,
        count: int,
        trains: str = "",
        *,
        stages: int = STAGES,
        virtual: int = 1,
    ):
        """Builds the model and compiles its stages.

        Args:
          unit: seconds of an operation.
          count: number of micro-batches.
          trains: part of the paths of trained parameters.
          stages: number of stages.
          virtual: chunks of each stage, of one block each.
        """
        model = dataclasses.replace(MODEL, layers=stages * virtual)
        graph, parameters = split(build_model(jax.random.key(0), model))
        # As in a run, whole arrays are on the devices of all stages.
        everywhere = Mesh(np.array(jax.devices()[:stages]), "stage")
        placed = jax.device_put(parameters, NamedSharding(everywhere, PartitionSpec()))
        self._trained = {path: x for path, x in placed.items() if trains in path}
        self._frozen = {path: x for path, x in placed.items() if trains not in path}
        devices = [StageDevices(device) for device in jax.devices()[:stages]]
        self._orders: tuple[Order, ...] = ()
        self._batch = random_batch(count)
        self._gradients = PipelinedGradients(
            graph, devices, [1] * model.layers, lambda _count, _prefix: self._orders
        )
        # Compile everything before any operation is made slower.
        for two_stage in (False, True):
            orders = stage_orders("1f1b", stages, count, two_stage, virtual=virtual)
            self.seconds(orders)
        (compiled,) = self._gradients._compiled.values()
        for programs in compiled.programs:
            for kind, units in UNITS.items():
                slow = slowed(getattr(programs, kind), unit * units)
                setattr(programs, kind, slow)

    def seconds(self, orders: tuple[Order, ...]) -> StepSeconds:
        """Returns the time of one step."""
        self._orders = orders
        times = [time.perf_counter()]
        step = self._begin()
        times.append(time.perf_counter())
        self._gradients.run(step)
        times.append(time.perf_counter())
        jax.block_until_ready(self._gradients.finish(step))
        times.append(time.perf_counter())
        return StepSeconds(*(end - start for start, end in itertools.pairwise(times)))

    def _begin(self) -> StepInStages:
        return self._gradients.begin(self._trained, self._frozen, self._batch, None)

    def begin(self, pipeline: MemberPipeline) -> MemberStep:
        """Starts a step among others."""
        return pipeline.submit(self._begin())

    def end(self, pipeline: MemberPipeline, member: MemberStep) -> None:
        """Waits for the gradient of a step."""
        pipeline.wait(member)
        jax.block_until_ready(self._gradients.finish(member.step))


class EmulatedMembers:
    """Members of a sweep that share an emulated pipeline, without updates.

    They train one parameter of each block, as adapters do.
    """

    def __init__(self, unit: float, members: int, count: int):
        """Builds the model and compiles its stages.

        Args:
          unit: seconds of an operation.
          members: number of members.
          count: micro-batches of a member's step.
        """
        self._members = members
        self._single = EmulatedPipeline(unit, count, trains="self_attention/query")
        self._pipeline = MemberPipeline(MemberOrders(STAGES, members, count))

    def seconds(self, steps: int) -> float:
        """Returns the time of a member's step while all members step.

        The first step of each member fills the pipeline and is not counted.
        """
        latest = [self._single.begin(self._pipeline) for _ in range(self._members)]
        start = time.perf_counter()
        for number in range(steps + 1):
            for k in range(self._members):
                self._single.end(self._pipeline, latest[k])
                latest[k] = self._single.begin(self._pipeline)
            if number == 0:
                start = time.perf_counter()
        total = time.perf_counter() - start
        self._pipeline.drain()
        return total / (steps * self._members)


def slowed(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """Returns a function that takes a fixed time, from its call to its results."""

    def run(*arguments: Any) -> Any:
        start = time.perf_counter()
        results = jax.block_until_ready(function(*arguments))
        wait_until(start + seconds)
        return results

    return run


def random_batch(count: int) -> Batch:
    """Returns micro-batches of two rows of eight learned tokens."""
    tokens = jax.random.randint(jax.random.key(1), (count, 2, 8), 0, 32)
    positions = jnp.broadcast_to(jnp.arange(1, 8), (count, 2, 7))
    return Batch(
        tokens=tokens,
        lengths=jnp.full((count, 2), 8),
        targets=tokens,
        loss_positions=positions,
        loss_weights=jnp.ones((count, 2, 7)),
        prefix_lengths=jnp.ones((count, 2), int),
    )


if __name__ == "__main__":
    main()
