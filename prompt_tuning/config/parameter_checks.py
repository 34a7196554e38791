"""Types and limits of the parameters of factories, however they are configured."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.field_checks import check_value
from prompt_tuning.core.flat_options import TABLE

MAXIMUM_LENGTH = 100_000
"""Maximum of lengths, ranks and counts that trained parameters have as an axis."""
MAXIMUM_ROWS = 1_000_000
MAXIMUM_LAYERS = 10_000
MAXIMA = {
    **dict.fromkeys(("length", "task_length", "tasks", "rank"), MAXIMUM_LENGTH),
    **dict.fromkeys(("hidden", "hidden_width"), MAXIMUM_LENGTH),
    **dict.fromkeys(("shared_features", "task_features"), MAXIMUM_LENGTH),
    **dict.fromkeys(("new_tokens", "buckets"), MAXIMUM_LENGTH),
    **dict.fromkeys(("batch_size", "accumulate", "packed_length"), MAXIMUM_ROWS),
    **dict.fromkeys(("resamples", "width", "feed_forward_width"), MAXIMUM_ROWS),
    **dict.fromkeys(("layers", "encoder_layers", "heads"), MAXIMUM_LAYERS),
    "head_width": MAXIMUM_LENGTH,
    "vocabulary_size": 100 * MAXIMUM_ROWS,
}
"""Maximum of every parameter that memory is allocated by, by its name."""
MINIMA = {
    option.setting.rpartition("/")[2]: option.minimum
    for option in TABLE
    if option.setting and option.kind is int
}
"""Minimum of the parameters that options set, such as "Run.steps"."""


def check_parameter(factory: Callable[..., Any], name: str, value: Any) -> None:
    """Checks the type and the size of a value for a factory's parameter.

    Raises:
      InputError: if it cannot be used.
    """
    hints, label = _hints(factory), f"{factory.__name__}.{name}"
    if name in hints:
        check_value(label, value, hints[name])
        if isinstance(value, int):
            _check_size(label, value, MINIMA.get(label), MAXIMA.get(name))


def _check_size(
    label: str, value: int, minimum: int | None, maximum: int | None
) -> None:
    if minimum is not None and value < minimum:
        raise InputError(f"{label} is {value}, expected at least {minimum}")
    if maximum is not None and value > maximum:
        raise InputError(f"{label} is {value:,}, expected at most {maximum:,}")


@functools.cache
def _hints(factory: Callable[..., Any]) -> Mapping[str, Any]:
    """Returns the types of a factory's parameters."""
    function = factory.__init__ if isinstance(factory, type) else factory
    return get_type_hints(function)
