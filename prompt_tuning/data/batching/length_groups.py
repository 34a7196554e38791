"""Divides rows into batches of few lengths, for reading each row once in any order."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, Integer

from prompt_tuning.data.batching.batch_plan import FILLING, BucketPlan


class LengthGroup(NamedTuple):
    """The rows of a batch.

    Attributes:
      rows: number of each row, or `FILLING` for none.
      length: length to pad to.
    """

    rows: Int64[np.ndarray, "B"]
    length: int

    @property
    def real(self) -> list[int]:
        """Numbers of the rows, without those that fill the batch up."""
        return self.rows[self.rows != FILLING].tolist()

    @property
    def repeated(self) -> list[int]:
        """Numbers of all rows; those that fill the batch up repeat the last one."""
        return [*self.real, *self.real[-1:] * (len(self.rows) - len(self.real))]


def group_by_length(
    lengths: Sequence[int] | Integer[np.ndarray, "E"],
    *,
    batch_size: int,
    maximum_length: int | None,
    row_parts: int = 1,
) -> list[LengthGroup]:
    """Divides rows into batches; one more length is worth its compilation.

    Args:
      lengths: number of tokens of each row.
      batch_size: maximum number of rows of a batch.
      maximum_length: maximum length to pad to; None for no limit.
      row_parts: number of devices that the rows of a batch are divided among.
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
