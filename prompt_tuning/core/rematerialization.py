"""Rematerialization: save some activations for the backward pass, recompute the rest.

A saved activation stays on the device or in host memory; the rest are recomputed from
saved ones (Chen et al. 2016). A block's input is its *outer* activation, all others are
*inner* ones. You can offload outer activations to host memory, recompute inner ones, or
both.

Under every policy, weights that a block gathers from other devices or slices from the
stack of all blocks are gathered and sliced again: saving them for the backward pass
would make a second copy of the model.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.number_ranges import NonnegativeInteger, PositiveInteger

SavedActivations = Literal["none", "dots", "attention", "names", "nothing"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockRange:
    """Consecutive blocks that rematerialize differently from the rest of their stack.

    Attributes:
      start: index of the first block.
      stop: index after the last block.
      policy: as in `Rematerialization`, like the other fields.
      names: names for the policy "names".
      offload: whether inputs of blocks are moved to the host's memory.
      every: number of consecutive blocks that are wrapped together.

    Raises:
      InputError: if the fields contradict each other.

    Examples:
      >>> first_two = pt.BlockRange(start=0, stop=2, policy="nothing")
      >>> small = pt.load(
      ...     "bundled:skills-decoder",
      ...     rematerialization=pt.Rematerialization(ranges=[first_two]),
      ... )
    """

    start: NonnegativeInteger
    stop: PositiveInteger
    policy: SavedActivations = "none"
    names: Sequence[str] = ()
    offload: bool = False
    every: PositiveInteger = 1

    def __post_init__(self):
        check_fields(self)
        # Builds the policy, which checks the fields.
        if self.rematerialization.names:
            object.__setattr__(self, "names", tuple(self.names))

    @property
    def rematerialization(self) -> "Rematerialization":
        """The same policy for a whole stack."""
        return Rematerialization(
            policy=self.policy,
            names=self.names,
            offload=self.offload,
            every=self.every,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rematerialization:
    """Which activations of the blocks are saved for the backward pass, and where.

    Turn it on when a step runs out of memory; it changes no number. Try "dots" first,
    then "attention", then "nothing", which runs each block twice; add `offload` if even
    the blocks' inputs do not fit.

    Attributes:
      policy: which inner activations are saved: "none" saves all, i.e. recomputes
        nothing; "dots" saves the output of each projection; "attention" saves the
        output of attention before its output projection; "names" saves the activations
        listed in `names`; "nothing" saves none, so each block runs twice. All but the
        last two also save what a recurrent mixer computes before its gate.
      names: names for the policy "names": the blocks name "query", "keys", "values",
        "attention", "memory" (of a recurrent mixer), "gate" and "up", and your code may
        name others with `named`.
      skip_first: number of blocks at the start that recompute only element-wise
        operations and offload nothing.
      skip_last: number of such blocks at the end.
      offload: whether each block's input is moved to the host's pinned memory, and back
        when the backward pass reaches the block.
      every: number of consecutive blocks that are wrapped together: only the input of
        the first is saved (or offloaded), and all of them are recomputed together. A
        remainder at the end of a stack is wrapped together.
      ranges: blocks that follow another policy than the fields above.

    Raises:
      InputError: if the fields contradict each other.

    Examples:
      >>> small = pt.load(
      ...     "bundled:skills-decoder",
      ...     rematerialization=pt.Rematerialization(policy="nothing", skip_last=1),
      ... )
    """

    policy: SavedActivations = "none"
    names: Sequence[str] = ()
    skip_first: NonnegativeInteger = 0
    skip_last: NonnegativeInteger = 0
    offload: bool = False
    every: PositiveInteger = 1
    ranges: Sequence[BlockRange] = ()

    def __post_init__(self):
        check_fields(self)
        if isinstance(self.names, str) or not isinstance(self.names, Sequence):
            raise InputError(
                f"Rematerialization.names is {shown(self.names)}, expected a list of "
                "strings"
            )
        # Part of a model's structure, which is a key of compiled programs: hashable.
        object.__setattr__(self, "names", tuple(self.names))
        if bool(self.names) != (self.policy == "names"):
            raise InputError(
                f"Rematerialization.names is {self.names} and policy "
                f"{shown(self.policy)}: names are for policy 'names', which needs some"
            )
        object.__setattr__(self, "ranges", tuple(self.ranges))
        self._check_skips()
        self._check_segments()

    def _check_skips(self) -> None:
        if self.skipped_blocks and not self.active:
            raise InputError(
                f"Rematerialization skips {self.skip_first} blocks at the start and "
                f"{self.skip_last} at the end, but its policy is 'none' and nothing is "
                "offloaded: choose a policy, or skip no block"
            )

    def _check_segments(self) -> None:
        if self.every > 1 and not self.wraps:
            raise InputError(
                f"Rematerialization.every is {self.every}, but its policy is 'none' "
                "and nothing is offloaded: choose a policy, such as 'nothing'"
            )
        end = 0
        for part in self.ranges:
            if not end <= part.start < part.stop:
                raise InputError(
                    f"Rematerialization.ranges has the blocks {part.start} to "
                    f"{part.stop}, expected a start of at least {end} and a larger "
                    "stop: list the ranges in order, without overlap"
                )
            end = part.stop

    @property
    def wraps(self) -> bool:
        """Whether anything is recomputed or offloaded outside of `ranges`."""
        return self.policy != "none" or self.offload

    @property
    def active(self) -> bool:
        """Whether anything is recomputed or offloaded."""
        return self.wraps or any(part.rematerialization.wraps for part in self.ranges)

    @property
    def skipped_blocks(self) -> int:
        """Number of blocks that are skipped."""
        return self.skip_first + self.skip_last

    @property
    def alike(self) -> bool:
        """Whether all blocks of a stack are computed in the same way, one by one."""
        return not self.skipped_blocks and not self.ranges and self.every == 1

    def for_each_block(self) -> "Rematerialization":
        """Returns the same policy for all blocks, each wrapped separately."""
        return dataclasses.replace(self, skip_first=0, skip_last=0, ranges=(), every=1)

    def parts(self, layers: int) -> list[tuple[int, int, "Rematerialization"]]:
        """Returns consecutive ranges `(start, stop, policy)` that cover all blocks."""
        middle = dataclasses.replace(self, skip_first=0, skip_last=0, ranges=())
        last, plain = layers - self.skip_last, Rematerialization()
        changes = [(0, self.skip_first, plain), (last, layers, plain)]
        changes[1:1] = [(x.start, x.stop, x.rematerialization) for x in self.ranges]
        parts, end = [], 0
        for start, stop, policy in changes:
            parts += [(end, start, middle), (start, stop, policy)]
            end = stop
        return [part for part in parts if part[0] < part[1]]

    def check_layers(self, stack: str, layers: int) -> None:
        """Checks the ranges, and that not all blocks are skipped.

        Raises:
          InputError: if all blocks are skipped, or a range has blocks that do not
            exist.
        """
        if self.skipped_blocks and self.skipped_blocks >= layers:
            raise InputError(
                f"Rematerialization skips {self.skip_first} + {self.skip_last} blocks "
                f"of a {stack} that has {layers}: skip fewer, or choose the policy "
                "'none'"
            )
        first, last = self.skip_first, layers - self.skip_last
        for part in self.ranges:
            if part.start < first or part.stop > last:
                raise InputError(
                    f"Rematerialization.ranges has the blocks {part.start} to "
                    f"{part.stop} of a {stack} whose blocks {first} to {last} are not "
                    "skipped: choose among them"
                )
