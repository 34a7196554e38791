"""Settings of pipeline parallelism."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.number_ranges import BlockCount, RowCount

NONE, GPIPE, ONE_F_ONE_B, ZERO_BUBBLE = "none", "gpipe", "1f1b", "zb-h1"
ONE_F_ONE_B_DOUBLE = "1f1b-2"
SCHEDULES = (NONE, GPIPE, ONE_F_ONE_B, ONE_F_ONE_B_DOUBLE, ZERO_BUBBLE)
AUTO = "auto"
LARGE_SHARE = 0.1
"""Share of the weights' gradients in the backward pass above which they are postponed.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipeline:
    """How the stages of a pipeline (`MeshShape.stage`) share a step.

    The defaults choose a schedule for you. The page on pipelines explains when stages
    pay off.

    Attributes:
      schedule: order of the operations: "none", "gpipe", "1f1b", "1f1b-2" or "zb-h1".
        "auto" chooses "zb-h1" if the backward pass has two parts, else "1f1b".
      microbatches: number of micro-batches per step, a multiple of `Run.accumulate`;
        None for `Run.accumulate`.
      two_stage: whether to compute the weights' gradients separately from the inputs',
        at times when a stage would otherwise wait. None does so if they take more than
        a tenth of the backward pass; those of prompts and small adapters take less.
      layers: number of blocks per stage, an encoder's first; None balances the stages
        by counted operations, including the head. With `virtual`, the number per chunk:
        first the first chunk of every stage, then the second of every stage, and so on.
      virtual: chunks of blocks per stage, `v`. Stage `s` of `N` then holds the model's
        chunks `s`, `s + N`, `s + 2 N`, ..., and "1f1b" interleaves them as Megatron
        does: a step waits `v` times less and sends `v` times more.
      joined_p2: whether to compute the weights' gradients that remain at the end of a
        step as one product over all their micro-batches.

    Raises:
      InputError: if a value is invalid, or two contradict each other.

    Examples:
      >>> pt.Pipeline(microbatches=8).build().schedule_for(two_stage=False)
      '1f1b'
    """

    schedule: Literal["auto", "none", "gpipe", "1f1b", "1f1b-2", "zb-h1"] = AUTO
    microbatches: RowCount | None = None
    two_stage: bool | None = None
    layers: Sequence[BlockCount] | None = None
    joined_p2: bool = False
    virtual: BlockCount = 1

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
        if self.virtual > 1 and self.schedule not in (AUTO, ONE_F_ONE_B):
            raise InputError(
                f"Pipeline.virtual is {self.virtual} and Pipeline.schedule is "
                f"{self.schedule!r}, but only {ONE_F_ONE_B!r} interleaves several "
                f"chunks of a stage: set schedule to {ONE_F_ONE_B!r} or {AUTO!r}, or "
                "virtual to 1"
            )
        if self.virtual > 1 and self.joined_p2:
            raise InputError(
                f"Pipeline.joined_p2 is True and Pipeline.virtual is {self.virtual}, "
                "but the gradients that are left at the end belong to several chunks: "
                "set joined_p2 to False, or virtual to 1"
            )
        if self.joined_p2 and (self.two_stage is False or self.schedule == NONE):
            raise InputError(
                f"Pipeline.joined_p2 is True with schedule {self.schedule!r} and "
                f"two_stage {self.two_stage}: nothing is postponed to the end of the "
                "step; set joined_p2 to False, or choose another schedule with "
                "two_stage = True"
            )

    def in_two_parts(self, share: float) -> bool:
        """Whether the backward pass is computed in two parts.

        Args:
          share: share of the weights' gradients in the backward pass's operations.
        """
        if self.two_stage is not None:
            return self.two_stage
        return self.schedule == ZERO_BUBBLE or self.joined_p2 or share > LARGE_SHARE

    def schedule_for(self, two_stage: bool) -> str:
        """Returns the schedule, with "auto" resolved."""
        if self.schedule != AUTO:
            return self.schedule
        if self.virtual > 1:
            return ONE_F_ONE_B
        return ZERO_BUBBLE if two_stage else ONE_F_ONE_B

    def count(self, accumulate: int) -> int:
        """Returns the number of micro-batches of a step."""
        return accumulate if self.microbatches is None else self.microbatches
