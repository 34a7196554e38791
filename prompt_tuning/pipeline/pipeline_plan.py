"""Plans a pipeline, checks its settings, and gives the timeline of a step."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TypeVar

from prompt_tuning.core.errors import InputError
from prompt_tuning.pipeline.operation_counts import ModelWork
from prompt_tuning.pipeline.schedules import Order, check_schedule, stage_orders
from prompt_tuning.pipeline.simulation import (
    OperationCosts,
    Timeline,
    microbatches_below,
    peak_held,
    simulate,
)
from prompt_tuning.settings.pipeline import AUTO, Pipeline

Value = TypeVar("Value")

SMALL_BUBBLE = 0.1
"""Bubble share below which more micro-batches are not proposed."""


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    """How the stages of a pipeline share one step.

    Attributes:
      layers: number of blocks of each stage, an encoder's first; with virtual stages of
        each chunk: first every stage's first chunk, then the second ones.
      schedule: name of the schedule.
      two_stage: whether the backward pass has two parts.
      microbatches: number of micro-batches of a step.
      costs: operations of each stage, or chunk, as shares of a step without bubbles.
      prefix: whether a prompt shared by all rows crosses the stages.
      virtual: number of chunks per stage.
    """

    layers: tuple[int, ...]
    schedule: str
    two_stage: bool
    microbatches: int
    costs: tuple[OperationCosts, ...]
    prefix: bool = False
    virtual: int = 1

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.layers) // self.virtual

    def of_stages(self, values: Sequence[Value]) -> list[tuple[Value, ...]]:
        """Groups the values of all chunks by stage."""
        stages = range(self.stages)
        return [tuple(values[stage :: self.stages]) for stage in stages]

    @functools.cached_property
    def orders(self) -> tuple[Order, ...]:
        """The operations of each stage."""
        return stage_orders(
            self.schedule,
            self.stages,
            self.microbatches,
            self.two_stage,
            prefix=self.prefix,
            virtual=self.virtual,
        )

    @functools.cached_property
    def timeline(self) -> Timeline:
        """The simulated timeline of a step, in units of a step without bubbles."""
        return simulate(self.orders, self.costs)

    def in_flight(self) -> tuple[int, ...]:
        """Returns the most micro-batches of each chunk that wait for p1 at a time."""
        return tuple(int(peak_held(order, 1, 0)) for order in self._chunk_orders())

    def postponed(self) -> tuple[int, ...]:
        """Returns the most micro-batches of each chunk that wait for p2 at a time."""
        return tuple(int(peak_held(order, 0, 1)) for order in self._chunk_orders())

    def _chunk_orders(self) -> list[Order]:
        """Returns the operations of each chunk, in the order of the model's blocks."""
        return [
            tuple(operation for operation in order if operation.chunk == chunk)
            for chunk in range(self.virtual)
            for order in self.orders
        ]

    def peak_bytes(
        self, kept: Sequence[int], postponed: Sequence[int]
    ) -> tuple[int, ...]:
        """Returns the most bytes that each stage holds between two operations.

        Args:
          kept: bytes that each stage, or chunk, keeps per micro-batch for its backward
            pass.
          postponed: bytes of them, and of p1's results, that it keeps for p2.
        """
        sizes = self.of_stages(kept), self.of_stages(postponed)
        by_stage = zip(self.orders, *sizes, strict=True)
        return tuple(int(peak_held(*arguments)) for arguments in by_stage)

    def needed_microbatches(self) -> int | None:
        """Returns the fewest micro-batches with a small bubble, or None."""
        return microbatches_below(
            SMALL_BUBBLE, self.schedule, self.two_stage, self.costs, self.virtual
        )

    def report(self) -> str:
        """Describes the plan and its bubble in one line."""
        parts = "two parts" if self.two_stage else "one part"
        by_stage = self.of_stages(self.layers)
        blocks = ", ".join(" + ".join(map(str, chunks)) for chunks in by_stage)
        schedule = self.schedule
        if self.virtual > 1:
            schedule += f" with {self.virtual} interleaved chunks of each stage"
        line = (
            f"pipeline: {self.stages} stages of {blocks} blocks, {schedule}, "
            f"backward pass in {parts}, {self.microbatches} micro-batches; bubble "
            f"{self.timeline.bubble_share:.0%}"
        )
        return f"{line}{self._advice()}"

    def _advice(self) -> str:
        """Suggests a number of micro-batches that would make the bubble small."""
        if self.timeline.bubble_share < SMALL_BUBBLE:
            return ""
        needed = self.needed_microbatches()
        if needed is None:
            return (
                f", which no number of micro-batches brings below {SMALL_BUBBLE:.0%}: "
                "the stages differ too much, or the schedule overlaps nothing"
            )
        return (
            f", below {SMALL_BUBBLE:.0%} from {needed} micro-batches (Run.accumulate)"
        )


def plan_pipeline(
    settings: Pipeline,
    stages: int,
    accumulate: int,
    work: ModelWork,
) -> PipelinePlan:
    """Plans a pipeline.

    Args:
      settings: the run's settings.
      stages: number of stages.
      accumulate: micro-batches of a step, unless the settings have another number.
      work: operations of the model for one micro-batch.

    Raises:
      InputError: if the blocks cannot be divided as the settings say.
    """
    blocks = work.blocks
    check_blocks(settings.layers, stages, len(blocks), settings.virtual)
    if settings.layers is None:
        totals = [float(block.total) for block in blocks]
        layers = balanced_layers(totals, stages * settings.virtual)
    else:
        layers = tuple(settings.layers)
    costs = _stage_costs(blocks, layers, stages)
    prefix = any(cost.prefix_forward for cost in costs)
    if not prefix:
        costs = (_without_p1(costs[0]), *costs[1:])
    later = sum(block.weight_gradient for block in blocks)
    backward = later + sum(block.input_gradient for block in blocks)
    two_stage = settings.in_two_parts(later / backward)
    return PipelinePlan(
        layers=layers,
        schedule=settings.schedule_for(two_stage),
        two_stage=two_stage,
        microbatches=settings.count(accumulate),
        costs=costs,
        prefix=prefix,
        virtual=settings.virtual,
    )


def balanced_layers(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Divides blocks so that the most expensive stage is as cheap as possible."""
    total = len(costs)
    # For each number of blocks: the largest cost of a stage, the sum of squares, which
    # decides between equals, and the blocks of each stage.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for _ in range(stages):
        longer: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for start, (largest, squares, layers) in best.items():
            cost = 0.0
            for end in range(start + 1, total + 1):
                cost += costs[end - 1]
                option = (
                    max(largest, cost),
                    squares + cost**2,
                    (*layers, end - start),
                )
                if end not in longer or option < longer[end]:
                    longer[end] = option
        best = longer
    return best[total][2]


def _stage_costs(
    blocks: Sequence[OperationCosts], layers: Sequence[int], stages: int
) -> tuple[OperationCosts, ...]:
    total = sum(block.total for block in blocks) / stages
    costs, start = [], 0
    for count in layers:
        costs.append(sum(blocks[start : start + count], OperationCosts()) / total)
        start += count
    return tuple(costs)


def _without_p1(first: OperationCosts) -> OperationCosts:
    """Returns the costs of a first stage with nothing trained before its blocks.

    It sends no gradient upstream, so its whole backward pass is p2.
    """
    backward = first.input_gradient + first.weight_gradient
    return dataclasses.replace(first, input_gradient=0.0, weight_gradient=backward)


def check_pipeline(pipeline: Pipeline, stages: int, accumulate: int) -> None:
    """Checks settings against the numbers of stages and micro-batches.

    Raises:
      InputError: gives the numbers.
    """
    count = pipeline.count(accumulate)
    if count % accumulate:
        raise InputError(
            f"Pipeline.microbatches is {count}, which is not a multiple of "
            f"Run.accumulate, {accumulate}: each of its batches is divided further"
        )
    two_stage = pipeline.two_stage is not False
    if pipeline.schedule != AUTO or pipeline.virtual > 1:
        schedule = pipeline.schedule_for(two_stage)
        check_schedule(schedule, stages, count, two_stage, pipeline.virtual)
    if pipeline.layers is None or len(pipeline.layers) == stages * pipeline.virtual:
        return
    expected = f"the mesh has {stages}"
    if pipeline.virtual > 1:
        expected += (
            f" with {pipeline.virtual} chunks each (Pipeline.virtual): expected "
            f"{stages * pipeline.virtual} numbers"
        )
    raise InputError(
        f"Pipeline.layers is {list(pipeline.layers)}, blocks of {len(pipeline.layers)} "
        f"stages, but {expected}"
    )


def check_blocks(
    layers: Sequence[int] | None, stages: int, blocks: int, virtual: int = 1
) -> None:
    """Checks that each stage gets a block, and that the stages have all blocks.

    Args:
      layers: number of blocks of each stage, or chunk, if set.
      stages: number of stages.
      blocks: number of blocks of the model, including an encoder's.
      virtual: number of chunks per stage.

    Raises:
      InputError: gives the numbers.
    """
    if virtual > 1 and stages * virtual > blocks:
        raise InputError(
            f"MeshShape.stage is {stages} and Pipeline.virtual is {virtual}, together "
            f"{stages * virtual} chunks, but the model has {blocks} blocks and each "
            f"chunk needs one: set virtual to {max(1, blocks // stages)} or less"
        )
    if stages > blocks:
        raise InputError(
            f"MeshShape.stage is {stages}, but the model has {blocks} blocks and each "
            f"stage needs one: set it to {blocks} or less"
        )
    if layers is not None and sum(layers) != blocks:
        raise InputError(
            f"Pipeline.layers is {list(layers)}, together {sum(layers)} blocks, but "
            f"the model has {blocks}"
        )
