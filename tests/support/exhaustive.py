"""Chooses the cases of every run of the suite; the others run with `-m exhaustive`."""

from collections.abc import Iterable
from typing import Any

import pytest


def sample(count: int, values: Iterable[Any]) -> list[Any]:
    """Marks all parameters but the first few as `exhaustive`.

    The marked ones repeat the same check for other models, methods or settings.
    """
    values = list(values)
    return [*values[:count], *map(_mark, values[count:])]


def _mark(value: Any) -> Any:
    if hasattr(value, "marks"):  # a pytest.param
        marks = (*value.marks, pytest.mark.exhaustive)
        return pytest.param(*value.values, marks=marks, id=value.id)
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.exhaustive)
