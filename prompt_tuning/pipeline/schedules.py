"""Schedules of a pipeline: the operations of each stage, in order; without JAX.

A stage computes the forward and the backward pass of each micro-batch. A backward pass
in one part (`BACKWARD`) sends the gradient of the stage's input upstream when
everything is computed. In two parts, the gradient of the input (`INPUT_GRADIENT`, p1)
is sent first, and the gradient of the stage's weights (`WEIGHT_GRADIENT`, p2) is
computed later, when the stage would otherwise wait.

With virtual stages, a stage has many chunks of consecutive blocks: stage `s` of `N` has
chunks `s`, `s + N`, `s + 2 N`, ... of the model, numbered 0, 1, 2, ... here.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from prompt_tuning.core.errors import InputError, did_you_mean
from prompt_tuning.pipeline.operations import Kind, Operation, Order
from prompt_tuning.settings.pipeline import (
    GPIPE,
    NONE,
    ONE_F_ONE_B,
    ONE_F_ONE_B_DOUBLE,
    SCHEDULES,
    ZERO_BUBBLE,
)

IN_ONE_PART = (Kind.FORWARD, Kind.BACKWARD)
IN_TWO_PARTS = (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
"""The operations of a micro-batch on a stage, by the parts of its backward pass."""


class DeadlockError(ValueError):
    """No stage of a schedule can continue: each waits for another."""


def minimum_microbatches(schedule: str, stages: int) -> int:
    """Returns the smallest number of micro-batches for which a schedule is defined."""
    return 2 * stages if schedule == ONE_F_ONE_B_DOUBLE else 1


def stage_orders(
    schedule: str,
    stages: int,
    microbatches: int,
    two_stage: bool,
    *,
    prefix: bool = False,
    virtual: int = 1,
) -> tuple[Order, ...]:
    """Returns the operations of each stage, in order.

    Args:
      schedule: one of `SCHEDULES`:
        - "none": one micro-batch after another, so only one stage computes at a time;
        - "gpipe": all forward passes, then all backward passes (Huang et al. 2019,
          arXiv 1811.06965);
        - "1f1b": a backward pass as early as possible, so stage `s` of `N` has at most
          `N - s` micro-batches in flight (Narayanan et al. 2019, PipeDream);
        - "1f1b-2": the same with at least two micro-batches per stage (Rae et al. 2024,
          arXiv 2405.18047);
        - "zb-h1": 1f1b in which stage `s` postpones p2 by `s` micro-batches, so that no
          stage holds more than `N` (Qi et al. 2023, arXiv 2401.10241).
      stages: number of stages, `N`.
      microbatches: number of micro-batches of a step.
      two_stage: whether the backward pass has two parts.
      prefix: whether a prompt shared by all rows crosses the stages once.
      virtual: chunks per stage, `v`; from 2, "1f1b" interleaves them (Narayanan et al.
        2021, arXiv 2104.04473, section 2.2).

    Raises:
      InputError: if there is no such schedule, or it needs other numbers.
    """
    check_schedule(schedule, stages, microbatches, two_stage, virtual)
    kinds, indices = IN_TWO_PARTS if two_stage else IN_ONE_PART, range(microbatches)
    orders = []
    for stage in range(stages):
        if virtual > 1:
            sizes = stages, virtual, microbatches
            order = _interleaved(sizes, stage, two_stage)
        elif schedule == NONE:
            order = tuple(Operation(kind, i) for i in indices for kind in kinds)
        elif schedule == GPIPE:
            order = tuple(Operation(kind, i) for kind in kinds for i in indices)
        elif schedule == ZERO_BUBBLE:
            order = _late_weight_gradients(stages, stage, microbatches)
        else:
            order = _one_forward_one_backward(stages, stage, microbatches, two_stage)
        orders.append(_with_prefix(order) if prefix else order)
    return tuple(orders)


def check_schedule(
    schedule: str, stages: int, microbatches: int, two_stage: bool, virtual: int = 1
) -> None:
    """Checks that a schedule is defined for these numbers.

    Raises:
      InputError: gives the numbers, and what to set.
    """
    if schedule not in SCHEDULES:
        raise InputError(
            f"there is no schedule {schedule!r}{did_you_mean(schedule, SCHEDULES)}"
        )
    if stages < 1 or microbatches < 1:
        raise InputError(
            f"a pipeline of {stages} stages and {microbatches} micro-batches: expected "
            "at least one of each"
        )
    minimum = minimum_microbatches(schedule, stages)
    if microbatches < minimum:
        raise InputError(
            f"schedule {schedule!r} with {stages} stages needs at least {minimum} "
            f"micro-batches, but there are {microbatches}: set Run.accumulate to "
            f"{minimum} or more, or the schedule to {ONE_F_ONE_B!r}"
        )
    if schedule == ZERO_BUBBLE and not two_stage:
        raise InputError(
            f"schedule {ZERO_BUBBLE!r} has a backward pass in two parts, but two_stage "
            f"is False: set it to None or True, or the schedule to {ONE_F_ONE_B!r}"
        )
    if virtual == 1:
        return
    if schedule != ONE_F_ONE_B:
        raise InputError(
            f"Pipeline.virtual is {virtual} with schedule {schedule!r}, but only "
            f"{ONE_F_ONE_B!r} interleaves several chunks of a stage: set the schedule "
            f"to {ONE_F_ONE_B!r} or 'auto', or virtual to 1"
        )
    if microbatches % stages:
        raise InputError(
            f"Pipeline.virtual is {virtual}, so the number of micro-batches must be a "
            f"multiple of the {stages} stages, but it is {microbatches}: set "
            f"Run.accumulate or Pipeline.microbatches to "
            f"{-(-microbatches // stages) * stages}, or virtual to 1"
        )


def _one_forward_one_backward(
    stages: int, stage: int, microbatches: int, two_stage: bool
) -> Order:
    """Postpones p2 until no forward pass is left: it fills the waiting times there."""
    warm = min(microbatches, stages - stage)
    order = [Operation(Kind.FORWARD, i) for i in range(warm)]
    postponed = 0
    for i in range(microbatches):
        order.append(Operation(Kind.INPUT_GRADIENT if two_stage else Kind.BACKWARD, i))
        if warm + i < microbatches:
            order.append(Operation(Kind.FORWARD, warm + i))
        elif two_stage:
            order.append(Operation(Kind.WEIGHT_GRADIENT, postponed))
            postponed += 1
    if two_stage:
        order += [
            Operation(Kind.WEIGHT_GRADIENT, i) for i in range(postponed, microbatches)
        ]
    return tuple(order)


def _late_weight_gradients(stages: int, stage: int, microbatches: int) -> Order:
    warm = min(microbatches, stages - stage)
    order = [Operation(Kind.FORWARD, i) for i in range(warm)]
    for i in range(microbatches):
        order.append(Operation(Kind.INPUT_GRADIENT, i))
        if i >= stage:
            order.append(Operation(Kind.WEIGHT_GRADIENT, i - stage))
        if warm + i < microbatches:
            order.append(Operation(Kind.FORWARD, warm + i))
    first = max(microbatches - stage, 0)
    order += [Operation(Kind.WEIGHT_GRADIENT, i) for i in range(first, microbatches)]
    return tuple(order)


def _interleaved(sizes: tuple[int, int, int], stage: int, two_stage: bool) -> Order:
    """Orders a stage's chunks like Megatron's interleaved 1f1b.

    A micro-batch passes all stages once per chunk. A stage waits only for the first
    stage's chunk, so the bubble of `v` chunks is `(N - 1) / (v M)` of the work instead
    of `(N - 1) / M` (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

    The chunks take turns, with as many micro-batches per turn as there are stages. As
    without chunks, p2 is postponed until no forward pass is left. `sizes` are the
    numbers of stages, of chunks per stage, and of micro-batches.
    """
    stages, virtual, microbatches = sizes
    total = virtual * microbatches
    warm = min(total, 2 * (stages - stage - 1) + (virtual - 1) * stages)
    turns = []
    for i in range(total):
        group, place = divmod(i, stages * virtual)
        chunk, offset = divmod(place, stages)
        turns.append((group * stages + offset, chunk))
    backward: Kind = Kind.INPUT_GRADIENT if two_stage else Kind.BACKWARD
    forwards = [Operation(Kind.FORWARD, *turn) for turn in turns]
    backwards = [Operation(backward, i, virtual - 1 - chunk) for i, chunk in turns]
    order, postponed = forwards[:warm], deque[Operation]()
    for i, operation in enumerate(backwards):
        order += [*forwards[warm + i : warm + i + 1], operation]
        if two_stage:
            postponed.append(operation._replace(kind=Kind.WEIGHT_GRADIENT))
            if warm + i >= total:
                order.append(postponed.popleft())
    return (*order, *postponed)


def join_end(order: Order) -> tuple[Order, int]:
    """Joins the weight gradients at the end of a stage's operations into one.

    Returns:
      the operations, and how many micro-batches the last one joins; 1 if nothing is
      joined.
    """
    kinds = [operation.kind for operation in order]
    count = 0
    while count < len(kinds) and kinds[-1 - count] == Kind.WEIGHT_GRADIENT:
        count += 1
    if count < 2:
        return order, 1
    return (*order[:-count], Operation(Kind.JOINED_GRADIENT, 0)), count


def _with_prefix(order: Order) -> Order:
    """Adds the prefix to each chunk: before its rows, and when all have gradients."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for at, (kind, _, chunk) in enumerate(order):
        first.setdefault(chunk, at)
        if kind in (Kind.INPUT_GRADIENT, Kind.BACKWARD):
            last[chunk] = at
    added: list[Operation] = []
    for at, operation in enumerate(order):
        if first[operation.chunk] == at:
            added.append(Operation(Kind.PREFIX_FORWARD, 0, operation.chunk))
        added.append(operation)
        if last[operation.chunk] == at:
            added.append(Operation(Kind.PREFIX_BACKWARD, 0, operation.chunk))
    return tuple(added)


class Result(NamedTuple):
    """A result of an operation that others wait for.

    Attributes:
      name: kind of the operation that computes it; `INPUT_GRADIENT` for both forms of
        the backward pass.
      stage: the stage that computes it.
      microbatch: the micro-batch's index.
      chunk: which of the stage's chunks computes it.
    """

    name: Kind
    stage: int
    microbatch: int
    chunk: int = 0


def result_of(stage: int, operation: Operation) -> Result:
    """Returns the result of an operation of a stage."""
    kind, microbatch, chunk = operation
    name = Kind.INPUT_GRADIENT if kind == Kind.BACKWARD else kind
    return Result(name, stage, microbatch, chunk)


def chunk_count(orders: Sequence[Order]) -> int:
    """Returns the number of chunks of each stage."""
    return 1 + max((operation.chunk for operation in orders[0]), default=0)


def needed_results(
    stage: int, operation: Operation, orders: Sequence[Order], chunks: int = 1
) -> Iterator[Result]:
    """Yields the results that an operation of a stage waits for."""
    kind, microbatch, chunk = operation
    # The chunks of all stages in the order in which a micro-batch passes them.
    stages = len(orders)
    place, count = chunk * stages + stage, chunks * stages
    if kind in (Kind.FORWARD, Kind.PREFIX_FORWARD):
        if place > 0:
            yield _result_at(place - 1, stages, kind, microbatch)
        if kind == Kind.FORWARD and orders[stage][0].kind == Kind.PREFIX_FORWARD:
            yield Result(Kind.PREFIX_FORWARD, stage, 0, chunk)
    elif kind in (Kind.INPUT_GRADIENT, Kind.BACKWARD):
        yield Result(Kind.FORWARD, stage, microbatch, chunk)
        if place + 1 < count:
            yield _result_at(place + 1, stages, Kind.INPUT_GRADIENT, microbatch)
    elif kind == Kind.WEIGHT_GRADIENT:
        yield Result(Kind.INPUT_GRADIENT, stage, microbatch, chunk)
    elif kind == Kind.PREFIX_BACKWARD:
        for earlier in orders[stage]:
            if earlier.chunk == chunk and earlier.kind in (
                Kind.INPUT_GRADIENT,
                Kind.BACKWARD,
            ):
                yield result_of(stage, earlier)
        if place + 1 < count:
            yield _result_at(place + 1, stages, Kind.PREFIX_BACKWARD, 0)


def _result_at(place: int, stages: int, name: Kind, microbatch: int) -> Result:
    """Returns the result of the chunk at a place in the order of the model's blocks."""
    chunk, stage = divmod(place, stages)
    return Result(name, stage, microbatch, chunk)


def runnable_sequence(orders: Sequence[Order]) -> Iterator[tuple[int, Operation]]:
    """Yields all operations in an order in which none waits for a later one.

    Raises:
      DeadlockError: if there is none; tells what each stage waits for.
    """
    finished: set[Result] = set()
    position, chunks = [0] * len(orders), chunk_count(orders)
    while any(at < len(order) for at, order in zip(position, orders, strict=True)):
        progress = False
        for stage, order in enumerate(orders):
            while position[stage] < len(order):
                operation = order[position[stage]]
                needed = needed_results(stage, operation, orders, chunks)
                if not finished.issuperset(needed):
                    break
                yield stage, operation
                finished.add(result_of(stage, operation))
                position[stage] += 1
                progress = True
        if not progress:
            raise DeadlockError(_deadlock_text(orders, position, finished))


def _deadlock_text(
    orders: Sequence[Order], position: Sequence[int], finished: set[Result]
) -> str:
    waiting = []
    for stage, (order, at) in enumerate(zip(orders, position, strict=True)):
        if at < len(order):
            needed = needed_results(stage, order[at], orders, chunk_count(orders))
            missing = next(result for result in needed if result not in finished)
            waiting.append(
                f"stage {stage} waits with {order[at].kind} {order[at].microbatch} for "
                f"{missing.name} {missing.microbatch} of stage {missing.stage}"
            )
    return f"the schedule cannot continue: {'; '.join(waiting)}"
