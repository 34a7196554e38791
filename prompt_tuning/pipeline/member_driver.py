"""Runs the steps of independent members through the same stages, one after another.

Each stage's thread computes an endless sequence of micro-batches, so stages do not wait
between steps. Whoever needs a member's gradient waits for that member only.
"""

import dataclasses
import queue
import threading
from collections.abc import Mapping
from typing import Any

from prompt_tuning.pipeline.driver import StepInStages
from prompt_tuning.pipeline.member_orders import MemberOrder, MemberOrders
from prompt_tuning.pipeline.schedules import Kind
from prompt_tuning.pipeline.transport import StoppedError

COUNTED = frozenset(
    {Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT, Kind.PREFIX_BACKWARD}
)
"""Operations that a member's gradient waits for."""


@dataclasses.dataclass
class MemberStep:
    """A member's step in the stages.

    Attributes:
      step: its arrays and workers.
      left: number of operations of the backward pass still to run, on all stages.
      failure: why it will not finish; None if it still may.
      finished: set when nothing is left, or the step failed.
    """

    step: StepInStages
    left: int
    failure: BaseException | None = None
    finished: threading.Event = dataclasses.field(default_factory=threading.Event)


class MemberPipeline:
    """The threads of the stages, and the order in which they run members' steps."""

    def __init__(self, orders: MemberOrders):
        """Sets the pipeline up; its threads start with the first step."""
        self._orders = orders
        self._lock = threading.Lock()
        self._steps: dict[int, MemberStep] = {}
        self._count = 0
        self._threads: list[_StageThread] = []

    def submit(self, step: StepInStages) -> MemberStep:
        """Adds a step of a member after its previous one has finished."""
        stages = [s for s, worker in enumerate(step.workers) if worker is not None]
        if not self._threads:
            self._steps, self._count = {}, 0
            orders = [MemberOrder(self._orders, s, step.prefix) for s in stages]
            self._threads = [
                _StageThread(self, stage, order)
                for stage, order in zip(stages, orders, strict=True)
            ]
        parts = 2 if self._orders.two_stage else 1
        operations = step.count * parts + step.prefix
        added = MemberStep(step, operations * len(stages))
        self._steps[self._count] = added
        self._count += 1
        for thread in self._threads:
            thread.add_step(self._steps)
        return added

    def wait(self, member: MemberStep) -> None:
        """Waits until the gradient of a step is computed.

        Raises:
          Exception: what a stage raised; by then all threads have ended.
        """
        member.finished.wait()
        if member.failure is not None:
            self.drain()
            raise member.failure
        # Its arrays are freed when its gradient has been read.
        self._steps = {n: step for n, step in self._steps.items() if step is not member}

    def drain(self) -> None:
        """Computes all submitted steps to the end, and ends the threads."""
        for thread in self._threads:
            thread.finish(self._steps)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def ran(self, member: MemberStep) -> None:
        """Counts an operation of a member's backward pass."""
        with self._lock:
            member.left -= 1
            if member.left == 0:
                member.finished.set()

    def fail(self, failure: BaseException) -> None:
        """Ends all steps, because a stage failed."""
        with self._lock:
            steps = self._steps.values()
            unfinished = [step for step in steps if not step.finished.is_set()]
        for member in unfinished:
            member.failure = failure
            for worker in member.step.workers:
                if worker is not None:
                    worker.stop()
            member.finished.set()


class _StageThread:
    """The thread of one stage, and its pending work."""

    def __init__(self, pipeline: MemberPipeline, stage: int, order: MemberOrder):
        self._pipeline, self._stage, self._order = pipeline, stage, order
        self._operations: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name=f"stage {stage}", daemon=True
        )
        self._thread.start()

    def add_step(self, steps: Mapping[int, MemberStep]) -> None:
        """Adds what can run once one more step is known."""
        for number, operation in self._order.add_step():
            self._operations.put((steps[number], operation))

    def finish(self, steps: Mapping[int, MemberStep]) -> None:
        """Adds the rest of all steps, and ends the thread after it."""
        for number, operation in self._order.finish():
            self._operations.put((steps[number], operation))
        self._operations.put(None)

    def join(self) -> None:
        """Waits until the thread has ended."""
        self._thread.join()

    def _run(self) -> None:
        while (item := self._operations.get()) is not None:
            member, operation = item
            if member.failure is not None:
                continue
            try:
                worker = member.step.workers[self._stage]
                assert worker is not None
                worker.run(operation.kind, operation.microbatch)
                if operation.kind in COUNTED:
                    self._pipeline.ran(member)
            except StoppedError:
                continue
            except BaseException as failure:
                self._pipeline.fail(failure)
