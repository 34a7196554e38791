"""Settings of LoRA, named as in PEFT."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from prompt_tuning.core.number_ranges import (
    AnyNumber,
    AxisLength,
    NonnegativeInteger,
    RankFactor,
    ShareBelowOne,
)

Initial = Literal["kaiming", "gaussian", "orthogonal", "pissa", "olora", "eva"]
"""Initial values of LoRA's factors; see `LoRA`."""
TrainedBiases = Literal["none", "lora_only", "all"]
"""Which biases of the model are trained as well; see `LoRA`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRASettings:
    """The fields of `LoRA`, which describes them."""

    at: Sequence[str] | str | None = None
    rank: AxisLength = 8
    alpha: AnyNumber = 16.0
    rank_stabilized: bool = False
    dropout: ShareBelowOne = 0.0
    layers: Sequence[NonnegativeInteger] | None = None
    rank_pattern: Mapping[str, AxisLength] | None = None
    alpha_pattern: Mapping[str, AnyNumber] | None = None
    initial: Initial = "kaiming"
    eva_rho: RankFactor = 2.0
    dora: bool = False
    bias: TrainedBiases = "none"
    invocation: Sequence[NonnegativeInteger] | None = None
