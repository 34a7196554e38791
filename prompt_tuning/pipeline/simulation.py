"""The timeline of a pipeline, simulated from each operation's cost; without JAX."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from prompt_tuning.pipeline import schedules
from prompt_tuning.pipeline.schedules import Kind, Operation, Order, Result
from prompt_tuning.settings.pipeline import NONE

Cost = float | int
"""A time, a number of operations or of bytes."""

MAXIMUM_MICROBATCHES = 4096
"""The largest number of micro-batches that `microbatches_below` tries."""

ROUNDING = 1e-9
"""Shares of bubbles that differ by less are equal."""


@dataclasses.dataclass(frozen=True)
class OperationCosts:
    """Cost of each operation of a part of the model, in any unit.

    Attributes:
      forward: cost of the forward pass of a micro-batch.
      input_gradient: cost of p1, including its recomputation.
      weight_gradient: cost of p2.
      prefix_forward: cost of the forward pass of a prompt shared by all rows, once per
        step.
      prefix_backward: cost of its backward pass.
    """

    forward: Cost = 0
    input_gradient: Cost = 0
    weight_gradient: Cost = 0
    prefix_forward: Cost = 0
    prefix_backward: Cost = 0

    def __add__(self, other: "OperationCosts") -> "OperationCosts":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return OperationCosts(*(mine + theirs for mine, theirs in pairs))

    def __truediv__(self, divisor: Cost) -> "OperationCosts":
        return OperationCosts(*(cost / divisor for cost in dataclasses.astuple(self)))

    def of(self, operation: Operation) -> Cost:
        """Returns the cost of an operation."""
        if operation.kind == Kind.BACKWARD:
            return self.input_gradient + self.weight_gradient
        return getattr(self, operation.kind)

    @property
    def total(self) -> Cost:
        """The cost of all operations on the rows of a micro-batch."""
        return self.forward + self.input_gradient + self.weight_gradient


class TimedOperation(NamedTuple):
    """When a stage computes an operation."""

    stage: int
    operation: Operation
    start: Cost
    end: Cost


@dataclasses.dataclass(frozen=True)
class Timeline:
    """When each stage computes each operation of a step.

    Attributes:
      stages: number of stages.
      spans: all operations, each stage's in the order of time.
      chunks: number of chunks per stage.
    """

    stages: int
    spans: tuple[TimedOperation, ...]
    chunks: int = 1

    @property
    def makespan(self) -> Cost:
        """The time from the first operation's start to the last one's end."""
        return max(span.end for span in self.spans)

    @property
    def busy(self) -> tuple[Cost, ...]:
        """Time that each stage computes."""
        times = [0.0] * self.stages
        for span in self.spans:
            times[span.stage] += span.end - span.start
        return tuple(times)

    @property
    def bubble_share(self) -> float:
        """Share of all stages' time spent waiting."""
        if self.makespan == 0:
            return 0.0
        return 1 - sum(self.busy) / (self.stages * self.makespan)


def simulate(
    orders: Sequence[Order], costs: Sequence[OperationCosts], transfer: Cost = 0.0
) -> Timeline:
    """Returns when each operation runs if every stage starts as soon as it can.

    Args:
      orders: the operations of each stage.
      costs: their costs, for each chunk in the order of the model's blocks: first every
        stage's first chunk, then the second ones, and so on.
      transfer: time of a message between neighboring stages, in the unit of the costs;
        messages overlap a stage's operations.

    Raises:
      DeadlockError: if the stages wait for each other.
    """
    ends: dict[Result, float] = {}
    free, chunks = [0.0] * len(orders), schedules.chunk_count(orders)
    spans = []
    for stage, operation in schedules.runnable_sequence(orders):
        start = free[stage]
        for needed in schedules.needed_results(stage, operation, orders, chunks):
            delay = transfer if needed.stage != stage else 0.0
            start = max(start, ends[needed] + delay)
        place = operation.chunk * len(orders) + stage
        end = start + costs[place].of(operation)
        ends[schedules.result_of(stage, operation)] = free[stage] = end
        spans.append(TimedOperation(stage, operation, start, end))
    spans.sort(key=lambda span: (span.stage, span.start, span.end))
    return Timeline(len(orders), tuple(spans), chunks)


def peak_held(
    order: Order, kept: Cost | Sequence[Cost] = 1, postponed: Cost | Sequence[Cost] = 1
) -> Cost:
    """Returns the most that a stage holds between two operations.

    Args:
      order: the stage's operations.
      kept: held per micro-batch from its forward to its backward pass, or p1; a
        sequence if the stage's chunks differ.
      postponed: held per micro-batch from p1 to p2. With 1 for both, the result is a
        number of micro-batches, counted once per chunk.
    """
    held = peak = 0
    for kind, _, chunk in order:
        first = kept[chunk] if isinstance(kept, Sequence) else kept
        later = postponed[chunk] if isinstance(postponed, Sequence) else postponed
        if kind == Kind.FORWARD:
            held += first
        elif kind == Kind.BACKWARD:
            held -= first
        elif kind == Kind.INPUT_GRADIENT:
            held += later - first
        elif kind == Kind.WEIGHT_GRADIENT:
            held -= later
        peak = max(peak, held)
    return peak


def bubble_limit(costs: Sequence[OperationCosts], virtual: int = 1) -> Cost:
    """Returns the bubble share that remains however many micro-batches there are.

    All stages wait for the one with the most work.
    """
    stages = len(costs) // virtual
    work = [sum(cost.total for cost in costs[stage::stages]) for stage in range(stages)]
    return 1 - sum(work) / (len(work) * max(work))


def microbatches_below(
    share: float,
    schedule: str,
    two_stage: bool,
    costs: Sequence[OperationCosts],
    virtual: int = 1,
) -> int | None:
    """Returns the fewest micro-batches with a smaller bubble share; None if none have.

    A prompt crosses the stages if its costs are not 0. With more than one chunk per
    stage, the number is a multiple of the number of stages.

    The search doubles the number until the share is small enough, up to
    `MAXIMUM_MICROBATCHES`, and then bisects.
    """
    prefix = any(cost.prefix_forward for cost in costs)
    stages = len(costs) // virtual
    multiple = stages if virtual > 1 else 1

    def small_enough(count: int) -> bool:
        orders = schedules.stage_orders(
            schedule,
            stages,
            count * multiple,
            two_stage,
            prefix=prefix,
            virtual=virtual,
        )
        return simulate(orders, costs).bubble_share < share - ROUNDING

    if schedule == NONE:  # each micro-batch has the same bubble
        return 1 if small_enough(1) else None
    if bubble_limit(costs, virtual) >= share - ROUNDING:
        return None
    low, high = 0, schedules.minimum_microbatches(schedule, stages)
    while not small_enough(high):
        low, high = high, 2 * high
        if high * multiple > MAXIMUM_MICROBATCHES:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if small_enough(middle) else (middle, high)
    return high * multiple
