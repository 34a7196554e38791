"""The settings of a pipeline, and how they are checked before a model is read."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.number_ranges import BlockCount, RowCount
from prompt_tuning.pipeline.schedules import (
    NONE,
    ONE_F_ONE_B,
    ZERO_BUBBLE,
    check_schedule,
)

AUTO = "auto"
LARGE_SHARE = 0.1
"""Share of the backward pass above which p2 is postponed by default."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipeline:
    """How the stages of a pipeline (`MeshShape.stage`) share a step.

    Attributes:
      schedule: order of the operations; see `schedules.stage_orders`. "auto" chooses
        "zb-h1" if the backward pass has two parts, and else "1f1b".
      microbatches: number of micro-batches into which the rows of a step are divided,
        a multiple of `Run.accumulate`; `Run.accumulate` if None.
      two_stage: whether the weights' gradients are computed apart from the inputs',
        where a stage would otherwise wait. If None, they are where they take more than
        a tenth of the backward pass, which is not so for prompts and small adapters.
      layers: number of blocks of each stage, an encoder's first; None balances
        the stages by counted operations, the head included.
      joined_p2: whether the gradients of weights that are left at the end of a step are
        computed as one product for all of their micro-batches.

    Raises:
      InputError: if a value cannot be used, or two contradict each other.
    """

    schedule: Literal["auto", "none", "gpipe", "1f1b", "1f1b-2", "zb-h1"] = AUTO
    microbatches: RowCount | None = None
    two_stage: bool | None = None
    layers: Sequence[BlockCount] | None = None
    joined_p2: bool = False

    def __post_init__(self):
        check_fields(self)
        if self.layers is not None:
            # gin gives lists, but settings must be hashable.
            object.__setattr__(self, "layers", tuple(self.layers))
            if not self.layers:
                raise InputError(
                    f"Pipeline.layers is {list(self.layers)}, expected at least one "
                    "block for each stage"
                )
        if self.schedule == ZERO_BUBBLE and self.two_stage is False:
            raise InputError(
                f"Pipeline.schedule is {ZERO_BUBBLE!r}, whose backward pass has two "
                "parts, but Pipeline.two_stage is False: set two_stage to None or "
                f"True, or the schedule to {ONE_F_ONE_B!r}"
            )
        if self.joined_p2 and (self.two_stage is False or self.schedule == NONE):
            raise InputError(
                f"Pipeline.joined_p2 is True with schedule {self.schedule!r} and "
                f"two_stage {self.two_stage}: nothing is postponed to the end of the "
                "step; set joined_p2 to False, or choose another schedule with "
                "two_stage = True"
            )

    def in_two_parts(self, share: float) -> bool:
        """Returns whether the backward pass is computed in two parts.

        Args:
          share: share of the weights' gradients in the operations of the backward pass.
        """
        if self.two_stage is not None:
            return self.two_stage
        return self.schedule == ZERO_BUBBLE or self.joined_p2 or share > LARGE_SHARE

    def schedule_for(self, two_stage: bool) -> str:
        """Returns the schedule, where "auto" is replaced."""
        if self.schedule != AUTO:
            return self.schedule
        return ZERO_BUBBLE if two_stage else ONE_F_ONE_B

    def count(self, accumulate: int) -> int:
        """Returns the number of micro-batches of a step."""
        return accumulate if self.microbatches is None else self.microbatches

    def check(self, stages: int, accumulate: int) -> None:
        """Checks the settings against the numbers of stages and of micro-batches.

        Raises:
          InputError: with the numbers.
        """
        count = self.count(accumulate)
        if count % accumulate:
            raise InputError(
                f"Pipeline.microbatches is {count}, which is not a multiple of "
                f"Run.accumulate, {accumulate}: each of its batches is divided further"
            )
        if self.schedule != AUTO:
            check_schedule(self.schedule, stages, count, self.two_stage is not False)
        if self.layers is not None and len(self.layers) != stages:
            raise InputError(
                f"Pipeline.layers is {list(self.layers)}, blocks of {len(self.layers)} "
                f"stages, but the mesh has {stages}"
            )


def check_blocks(layers: Sequence[int] | None, stages: int, blocks: int) -> None:
    """Checks that each stage can have a block, and that the stages have all of them.

    Args:
      layers: number of blocks of each stage, if it is set.
      stages: number of stages.
      blocks: number of blocks of the model, with an encoder's.

    Raises:
      InputError: with the numbers.
    """
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
