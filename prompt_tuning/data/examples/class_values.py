"""Reads the values that a record gives the classes of a head.

If labels do not exclude each other, a record lists the names or numbers of those that
apply, as data sets on the Hugging Face Hub do, or has a float for each class. In a
table, names are separated by commas. A regression has a number, or a list with one for
each class.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from prompt_tuning.core.batch import value_columns
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.model_choices import ClassProblem

UNREAD = "a"
"""Text that stands in the place of a completion that is not encoded."""


@dataclasses.dataclass(frozen=True)
class ClassValueEdit:
    """Turns the completion of a record, under `key`, into one value for each class.

    For example `{"prompt": "a", "labels": ["sad", "angry"]}`; numbers for a regression.
    """

    key: str
    labels: Sequence[str]
    problem: ClassProblem

    def __call__(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the record with the values."""
        if self.key not in record:
            raise InputError(
                f"found the keys {shown(sorted(record))}, expected {self.key!r}: name "
                "the key by DataSource.completion_key (--completion_key)"
            )
        given = record[self.key]
        read = self._numbers if self.problem == "regression" else self._labels
        values = dict(zip(value_columns(len(self.labels)), read(given), strict=True))
        return {**record, self.key: UNREAD, **values}

    def _numbers(self, given: Any) -> list[float]:
        items = given if isinstance(given, list) else [given]
        numbers = [_number(item) for item in items]
        found = [number for number in numbers if number is not None]
        if len(found) != len(self.labels) or len(found) < len(items):
            count = len(self.labels)
            expected = "a number" if count == 1 else f"a list of {count} numbers"
            raise InputError(f"{self.key!r} is {shown(given)}, expected {expected}")
        return found

    def _labels(self, given: Any) -> list[float]:
        names = [label.strip() for label in self.labels]
        items = given
        if isinstance(given, str):
            whole = given.strip()
            items = [whole] if whole in names else whole.split(",") if whole else []
        if not isinstance(items, list):
            items = [items]
        shares = [x for x in items if isinstance(x, float) and 0 <= x <= 1]
        if len(shares) == len(items) == len(names):
            return shares
        chosen = [self._index(item, names) for item in items]
        if None in chosen:
            raise InputError(
                f"{self.key!r} is {shown(given)}, expected a list of some of the "
                f"labels {shown(names)}, or of their numbers from 0"
            )
        numbers = [item for item in items if isinstance(item, int)]
        if len(set(numbers)) < len(numbers):
            raise InputError(
                f"{self.key!r} is {shown(given)}, which has the number of a class more "
                "than once; if it is a value of each class, write floats, such as "
                f"{shown([float(number) for number in numbers])}"
            )
        return [float(number in chosen) for number in range(len(names))]

    @staticmethod
    def _index(item: Any, names: Sequence[str]) -> int | None:
        if isinstance(item, str) and item.strip() in names:
            return names.index(item.strip())
        if isinstance(item, bool) or not isinstance(item, int):
            return None
        return item if 0 <= item < len(names) else None


def _number(item: Any) -> float | None:
    """Returns a finite number, also from a text in a table; None for anything else."""
    if isinstance(item, bool) or not isinstance(item, int | float | str):
        return None
    try:
        number = float(item)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
