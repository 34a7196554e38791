"""Scaling of rotary frequencies, for contexts longer than in a model's training."""

import dataclasses

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.number_ranges import (
    NonnegativeInteger,
    PositiveInteger,
    PositiveNumber,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """Scaling of rotary frequencies by their wavelength (Llama 3.1).

    Wavelengths above `original_positions / low_frequency_factor` are stretched by
    `factor`, those below `original_positions / high_frequency_factor` are unchanged,
    and those between are interpolated. Two factors of 0 stretch all wavelengths
    ("linear").

    Attributes:
      factor: divisor of the low frequencies.
      low_frequency_factor: see above.
      high_frequency_factor: see above.
      original_positions: context length of the model's first training.
    """

    factor: float
    low_frequency_factor: float = 0.0
    high_frequency_factor: float = 0.0
    original_positions: int = 1

    def __post_init__(self):
        check_fields(self)
        if not self.factor > 0:
            raise InputError(
                f"RotaryScaling.factor is {self.factor}, expected a positive number"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryDivisors:
    """A divisor for each rotary frequency.

    YaRN (Peng et al. 2023, section 3) and LongRoPE (Ding et al. 2024, section 3).

    Attributes:
      divisors: divisor of each frequency, the highest frequency first.
      magnitude: factor of the rotated elements of queries and keys.
      note: ending of messages about `ModelConfig.maximum_positions`, if longer rows
        need other divisors, which are not implemented (LongRoPE).
    """

    divisors: tuple[float, ...]
    magnitude: float = 1.0
    note: str = ""

    def __post_init__(self):
        check_fields(self)
        for value in (*self.divisors, self.magnitude):
            if not value > 0:
                raise InputError(
                    f"RotaryDivisors has the number {value}, expected positive ones"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryScaling:
    """A factor of queries that grows with their position `p` (Ministral 3, Llama 4).

    The factor is `1 + slope * log(1 + floor((p + first) / positions))`: it is 1 within
    the first `positions`, and keeps attention sharp among the keys of longer rows.

    Attributes:
      slope: see above.
      positions: see above.
      first: number of the first position: 0, or 1 (Llama 4).
      unrotated: whether only layers without rotary embedding use it (Llama 4).
    """

    slope: PositiveNumber
    positions: PositiveInteger
    first: NonnegativeInteger = 0
    unrotated: bool = False

    def __post_init__(self):
        check_fields(self)
