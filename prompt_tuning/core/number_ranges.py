"""Ranges of numbers, stated in the types of settings and options."""

import dataclasses
import math
import numbers
from typing import Annotated, Any


@dataclasses.dataclass(frozen=True)
class NumberRange:
    """Numbers between two bounds.

    Attributes:
      minimum: smallest number.
      maximum: largest number.
      above: whether `minimum` itself is excluded.
      below: whether `maximum` itself is excluded.
      also: numbers outside the bounds that have a special meaning.
    """

    minimum: float | int = -math.inf
    maximum: float | int = math.inf
    above: bool = False
    below: bool = False
    also: tuple[float | int, ...] = ()

    def __contains__(self, number: float | int) -> bool:
        """Tests whether a number is in the range; NaN and infinity never are."""
        return number in self.also or (
            abs(number) < math.inf  # also of integers that no float holds
            and (number > self.minimum if self.above else number >= self.minimum)
            and (number < self.maximum if self.below else number <= self.maximum)
        )

    def __str__(self) -> str:
        """Describes the range, to follow the word "expected"."""
        return " or ".join([*map(_text, self.also), self._bounds()])

    def _bounds(self) -> str:
        minimum, maximum = _text(self.minimum), _text(self.maximum)
        least = f"above {minimum}" if self.above else f"at least {minimum}"
        if math.isinf(self.minimum) and math.isinf(self.maximum):
            return "a finite number"
        if math.isinf(self.maximum):
            return f"a number {least}" if self.above else least
        most = f"below {maximum}" if self.below else maximum
        if math.isinf(self.minimum):
            return f"a number {most}" if self.below else f"at most {most}"
        if self.above:
            return f"a number {least} and {most if self.below else f'at most {most}'}"
        return f"a number from {minimum} to {most}"


def _text(number: float | int) -> str:
    if math.isfinite(number) and number == int(number):
        return f"{int(number):,}"
    return f"{number:g}"


def range_of(hint: Any) -> NumberRange:
    """Returns the range that a type like `PositiveInteger` states."""
    (bounds,) = hint.__metadata__
    return bounds


def as_number(value: Any) -> float | int | None:
    """Converts a number from Python, NumPy or JAX to Python; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    is_scalar = getattr(value, "shape", None) == () and hasattr(value, "__float__")
    return float(value) if is_scalar else None


MAXIMUM_LENGTH = 100_000
"""Maximum of lengths, ranks and counts that trained parameters have as an axis."""
MAXIMUM_ROWS = 1_000_000
MAXIMUM_LAYERS = 10_000

AnyInteger = Annotated[int, NumberRange()]
PositiveInteger = Annotated[int, NumberRange(1)]
NonnegativeInteger = Annotated[int, NumberRange(0)]
AxisLength = Annotated[int, NumberRange(1, MAXIMUM_LENGTH)]
RowCount = Annotated[int, NumberRange(1, MAXIMUM_ROWS)]
PoolSize = Annotated[int, NumberRange(2, MAXIMUM_LENGTH)]
DeviceCount = Annotated[int, NumberRange(1, also=(-1,))]
BlockCount = Annotated[int, NumberRange(1, MAXIMUM_LAYERS)]
VocabularySize = Annotated[int, NumberRange(1, 100 * MAXIMUM_ROWS)]

AnyNumber = Annotated[float | int, NumberRange()]
PositiveNumber = Annotated[float | int, NumberRange(0, above=True)]
NonnegativeNumber = Annotated[float | int, NumberRange(0)]
Share = Annotated[float | int, NumberRange(0, 1)]
OpenShare = Annotated[float | int, NumberRange(0, 1, above=True, below=True)]
ShareBelowOne = Annotated[float | int, NumberRange(0, 1, below=True)]

SMALLEST, LARGEST = 1e-6, 1e6
"""Bounds of numbers, so that float32 holds the scores that are computed with them."""
MAXIMUM_LOGPROBS = 20
"""Maximum number of alternatives of which log-probabilities are returned."""
MAXIMUM_PORT = 65_535

Temperature = Annotated[float | int, NumberRange(SMALLEST, LARGEST, also=(0,))]
PositiveShare = Annotated[float | int, NumberRange(SMALLEST, 1)]
RankFactor = Annotated[float | int, NumberRange(1, 1000)]
PositiveFactor = Annotated[float | int, NumberRange(SMALLEST, LARGEST)]
Penalty = Annotated[float | int, NumberRange(-LARGEST, LARGEST)]
LengthPenalty = Annotated[float | int, NumberRange(-50, 50)]
"""Exponent of lengths, whose powers fit into a float."""
SampleCount = Annotated[int, NumberRange(1, 128)]
SamplingTemperature = Annotated[float | int, NumberRange(SMALLEST, LARGEST)]
BeamCount = Annotated[int, NumberRange(2, 1000)]
LogprobCount = Annotated[int, NumberRange(0, MAXIMUM_LOGPROBS)]
Silence = Annotated[float | int, NumberRange(1, 86_400)]
"""Seconds without a heartbeat, at most a day."""
Port = Annotated[int, NumberRange(0, MAXIMUM_PORT)]

ALIASES = {
    name: value for name, value in vars().items() if hasattr(value, "__metadata__")
}
"""The types by name, for readers of source."""
