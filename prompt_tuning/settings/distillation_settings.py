"""Settings of context distillation."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from prompt_tuning.core.number_ranges import OpenShare, PositiveInteger

DivergenceKind = Literal["forward", "reverse", "jsd"]
"""How student and teacher are compared; see `ContextDistillation`."""
TargetKind = Literal["exact", "top", "hidden"]
"""The form of the teacher's predictions; see `ContextDistillation`."""


@dataclasses.dataclass(frozen=True)
class DistillationSettings:
    """The fields of `ContextDistillation`, which describes them."""

    context: str = ""
    context_key: str | None = None
    contexts: Sequence[str] | str | None = None
    cache_bytes: PositiveInteger = 2**30
    divergence: DivergenceKind = "forward"
    beta: OpenShare | None = None
    targets: TargetKind = "exact"
    mass: OpenShare = 0.99
    top: PositiveInteger = 64
