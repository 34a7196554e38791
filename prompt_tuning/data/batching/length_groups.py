"""Divides rows into batches of few lengths, for reading each row once in any order."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, Integer

from prompt_tuning.data.batching.batch_plan import FILLING, BucketPlan


class LengthGroup(NamedTuple):
    """The rows of a batch by number, or `FILLING`, and the length to pad them to."""

    rows: Int64[np.ndarray, "B"]
    length: int

    @property
    def real(self) -> list[int]:
        """Numbers of the rows without `FILLING`."""
        return self.rows[self.rows != FILLING].tolist()

    @property
    def repeated(self) -> list[int]:
        """Numbers of all rows, with the last one repeated in place of `FILLING`."""
        return [*self.real, *self.real[-1:] * (len(self.rows) - len(self.real))]


def group_by_length(
    lengths: Sequence[int] | Integer[np.ndarray, "E"],
    *,
    batch_size: int,
    maximum_length: int | None,
    row_parts: int = 1,
) -> list[LengthGroup]:
    """Divides rows into batches of few lengths; another one must pay for its
    compilation.

    `lengths` are the tokens of the rows; the rows of a batch divide among `row_parts`
    devices.
    """
    if not len(lengths):
        return []
    sizes = np.asarray(lengths, np.int64)
    plan = BucketPlan(
        sizes,
        sizes,
        np.ones_like(sizes),
        batch_size=batch_size,
        seed=0,
        shuffle=False,
        same_tokens=True,
        maximum_length=maximum_length,
        row_parts=row_parts,
    )
    return [LengthGroup(batch.rows, batch.input_length) for batch in plan.one_pass()]
