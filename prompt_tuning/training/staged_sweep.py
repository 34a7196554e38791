"""A sweep's step in the stages of a pipeline.

The members' micro-batches follow each other through the stages. A member's next step
starts as soon as its last one is finished, while the stages compute the other members.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from prompt_tuning.config.run import Run
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.core.status_line import status
from prompt_tuning.losses.objective import Objective
from prompt_tuning.pipeline.driver import PipelinedGradients
from prompt_tuning.pipeline.member_driver import MemberPipeline
from prompt_tuning.pipeline.member_orders import MemberOrders, check_member_schedule
from prompt_tuning.pipeline.pipeline_plan import PipelinePlan
from prompt_tuning.pipeline.stage_joins import FrozenParts
from prompt_tuning.training.pipelined_step import pipelined_finish, pipelined_gradients
from prompt_tuning.training.run_plan import RunPlan
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step import Finish, Metrics, step_key

Outcome = tuple[TrainState, Metrics]


class AwaitedSteps(Sequence):
    """Each member's state or metrics; reading one waits for it."""

    def __init__(self, read: Callable[[int], Outcome], count: int, part: int):
        """Describes the results.

        Args:
          read: waits for a member's step.
          count: number of members.
          part: 0 for the states, 1 for the metrics.
        """
        self._read, self._count, self._part = read, count, part

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, k: Any) -> Any:
        if not 0 <= k < self._count:
            raise IndexError(k)
        return self._read(k)[self._part]


class StagedSweepStep:
    """The step of all members; returns while the stages still compute."""

    def __init__(
        self,
        pipelines: Sequence[PipelinedGradients],
        finishes: Sequence[Finish],
        plan: PipelinePlan,
        *,
        dropout: bool,
        own_batches: bool,
    ):
        self._pipelines, self._finishes = pipelines, finishes
        self._dropout, self._own_batches = dropout, own_batches
        orders = MemberOrders(
            plan.stages, len(finishes), plan.microbatches, plan.two_stage
        )
        self._pipeline = MemberPipeline(orders)
        self._latest: list[Callable[[], Outcome]] = []
        self._shapes: set[tuple[int, ...]] = set()

    def __call__(
        self, states: Sequence[TrainState], frozen: Parameters, batch: Batch
    ) -> tuple[Sequence[TrainState], Sequence[Metrics]]:
        """Starts one step of every member; donates `states`.

        `states` may be the first result of the last call. Reading the results, the next
        states and each member's metrics, waits for them.
        """
        previous, self._latest = self._latest, []
        count = len(self._finishes)
        for k in range(count):
            state = previous[k]()[0] if isinstance(states, AwaitedSteps) else states[k]
            own = (
                jax.tree.map(lambda x, k=k: x[k], batch) if self._own_batches else batch
            )
            self._latest.append(self._start(k, state, frozen, own))
        latest = self._latest
        if batch.tokens.shape not in self._shapes:
            self._shapes.add(batch.tokens.shape)
            with status(f"compiling the stages ({batch.describe()})"):
                self._pipeline.drain()

        def read(k: int) -> Outcome:
            # Nothing follows the latest steps into the stages until they are read.
            if latest is self._latest:
                self._pipeline.drain()
            return latest[k]()

        return AwaitedSteps(read, count, 0), AwaitedSteps(read, count, 1)

    def _start(
        self, k: int, state: TrainState, frozen: Parameters, batch: Batch
    ) -> Callable[[], Outcome]:
        """Starts a member's step; returns a function that waits for it."""
        key, pipeline = step_key(state, self._dropout), self._pipelines[k]
        begun = pipeline.begin(state.trained, frozen, batch, key)
        member = self._pipeline.submit(begun)

        @functools.cache
        def outcome() -> Outcome:
            self._pipeline.wait(member)
            gradient, sums = pipeline.finish(begun)
            return self._finishes[k](state, frozen, gradient, batch, sums)

        return outcome


def check_stages(run: Run, plan: PipelinePlan, at_once: int | None) -> None:
    """Checks that members can follow each other through the stages of a plan.

    `at_once` must be None in stages.
    """
    if run.pipeline is not None and run.pipeline.joined_p2:
        raise InputError(
            "Pipeline.joined_p2 is True, but while members of a sweep follow each "
            "other no gradient of weights is postponed: set it to False"
        )
    if at_once is not None:
        raise InputError(
            f"--at_once is {at_once}, but with {plan.stages} stages (MeshShape.stage) "
            "the members' micro-batches follow each other: leave it out"
        )
    if plan.virtual > 1:
        raise InputError(
            f"Pipeline.virtual is {plan.virtual}, but members of a sweep follow each "
            "other through one chunk of each stage: set it to 1"
        )
    check_member_schedule(plan.schedule)


def staged_sweep_step(
    members: Sequence[RunPlan],
    objective: Objective,
    plan: PipelinePlan,
    *,
    own_batches: bool,
) -> StagedSweepStep:
    """Builds the step of a sweep whose model is in stages."""
    placed = FrozenParts()
    # Members with prompts of one length share the stages' programs.
    by_length: dict[int, PipelinedGradients] = {}
    for member in members:
        length = member.model.prompt_length
        if length not in by_length:
            by_length[length] = pipelined_gradients(member, objective, plan, placed)
    return StagedSweepStep(
        [by_length[member.model.prompt_length] for member in members],
        [pipelined_finish(member, objective) for member in members],
        plan,
        dropout=members[0].model.drops,
        own_batches=own_batches,
    )
