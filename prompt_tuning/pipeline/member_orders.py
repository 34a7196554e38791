"""The order of operations when independent members share a pipeline; without JAX.

The micro-batches of all members, step after step, form an endless sequence, and each
stage computes it in the order of 1f1b. While one member waits for its next update, the
stages compute the rest, so no stage waits between steps. There is no waiting time left
for p2, so it is not postponed.
"""

import dataclasses
from collections.abc import Iterator

from prompt_tuning.core.errors import InputError
from prompt_tuning.pipeline.schedules import Kind, Operation
from prompt_tuning.settings.pipeline import ONE_F_ONE_B, ZERO_BUBBLE

MEMBER_SCHEDULES = (ONE_F_ONE_B, ZERO_BUBBLE)
"""Schedules that continue from one step to the next."""


def check_member_schedule(schedule: str) -> None:
    """Checks that a schedule can continue from one member's step to the next.

    Raises:
      InputError: lists the schedules that can.
    """
    if schedule not in MEMBER_SCHEDULES:
        raise InputError(
            f"Pipeline.schedule is {schedule!r}, but the members of a sweep follow "
            f"each other in the order of {' or '.join(map(repr, MEMBER_SCHEDULES))}: "
            "set it to 'auto'"
        )


@dataclasses.dataclass(frozen=True)
class MemberOrders:
    """How far apart the operations of a micro-batch are on each stage.

    Attributes:
      stages: number of stages, `N`.
      members: number of members, `K`.
      microbatches: micro-batches of a member's step, `M`.
      two_stage: whether the backward pass has two parts.
    """

    stages: int
    members: int
    microbatches: int
    two_stage: bool = False

    @property
    def in_flight(self) -> int:
        """Largest number of micro-batches that the stages compute at a time.

        A member's next step starts when its previous one is finished. So at most all
        micro-batches except that step's are in flight, plus the first of the next.
        """
        return min(self.stages, (self.members - 1) * self.microbatches + 1)

    def delay(self, stage: int) -> int:
        """Returns how many more forward passes a stage computes before p1."""
        return min(self.stages - stage, self.in_flight) - 1


class MemberOrder:
    """The operations of one stage, as the micro-batches of members' steps arrive."""

    def __init__(self, orders: MemberOrders, stage: int, prefix: bool):
        """Starts the order of one stage.

        `prefix` tells whether a prompt shared by all rows crosses the stages.
        """
        self._orders, self._prefix = orders, prefix
        self._delay = orders.delay(stage)
        self._forward = self._backward = 0

    def add_step(self) -> Iterator[tuple[int, Operation]]:
        """Yields the operations up to the forward passes of one more step.

        Each comes with the index of its step.
        """
        for _ in range(self._orders.microbatches):
            yield from self._run_forward()
            yield from self._run_backward(self._delay)

    def finish(self) -> Iterator[tuple[int, Operation]]:
        """Yields the rest of the steps so far."""
        yield from self._run_backward(0)

    def _place(self, unit: int) -> tuple[int, int]:
        return divmod(unit, self._orders.microbatches)

    def _run_forward(self) -> Iterator[tuple[int, Operation]]:
        step, index = self._place(self._forward)
        if self._prefix and index == 0:
            yield step, Operation(Kind.PREFIX_FORWARD, 0)
        yield step, Operation(Kind.FORWARD, index)
        self._forward += 1

    def _run_backward(self, delay: int) -> Iterator[tuple[int, Operation]]:
        two_stage = self._orders.two_stage
        while self._backward < self._forward - delay:
            step, index = self._place(self._backward)
            yield (
                step,
                Operation(Kind.INPUT_GRADIENT if two_stage else Kind.BACKWARD, index),
            )
            if two_stage:
                yield step, Operation(Kind.WEIGHT_GRADIENT, index)
            if self._prefix and index == self._orders.microbatches - 1:
                yield step, Operation(Kind.PREFIX_BACKWARD, 0)
            self._backward += 1
