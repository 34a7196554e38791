"""Reads single rows of a table and leaves the rest in the checkpoint."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from prompt_tuning.checkpoints.stored_tensors import (
    Recipe,
    StoredTensor,
    assemble_parts,
    check_recipe,
    identity,
)

MAXIMUM_BYTES = 2**26
"""Maximum number of bytes that are read at once from an array without chunks."""


class StoredTable:
    """A float32 table `[V, D]` that stays in its checkpoint.

    `table[index]` reads the rows that NumPy would return for an index of the first
    axis, each row once. `numpy.asarray(table)` reads the whole table, block by block.

    Attributes:
      shape: `(V, D)`.
    """

    def __init__(
        self,
        path: str,
        shape: tuple[int, int],
        recipe: Recipe,
        stored: Mapping[str, StoredTensor],
        multiplier: float = 1.0,
    ):
        check_recipe(path, shape, recipe, stored)
        self.shape, self._multiplier = shape, np.float32(multiplier)
        self._read = functools.partial(
            assemble_parts, path, shape, np.dtype(np.float32), recipe, stored
        )
        self._maximum_rows = max(1, MAXIMUM_BYTES // (4 * shape[1]))
        self._chunk_rows = _rows_per_chunk(recipe, stored)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Float[np.ndarray, "*lead D"]:
        """Reads rows.

        Raises:
          IndexError: for a row outside the table.
          InputError: if the checkpoint turns out to be damaged.
        """
        ids = np.arange(len(self))[index]
        distinct, positions = np.unique(ids, return_inverse=True)
        rows = np.empty((len(distinct), self.shape[1]), np.float32)
        done = 0
        for group in self._groups(distinct):
            first, last = int(group[0]), int(group[-1]) + 1
            (block,) = self._read([(slice(first, last), slice(0, self.shape[1]))])
            rows[done : done + len(group)] = block[group - first] * self._multiplier
            done += len(group)
        return rows[positions.reshape(ids.shape)]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(
                "a table in a checkpoint cannot be an array without a copy"
            )
        return self[:].astype(dtype or np.float32, copy=False)

    def _groups(self, ids: Int[np.ndarray, "n"]) -> list[Int[np.ndarray, "_"]]:
        """Splits ascending ids into groups to read together.

        A group's rows are consecutive, or lie in one chunk of the file, which is
        decompressed as a whole for any of them.
        """
        if not len(ids):
            return []
        breaks = np.diff(ids // (self._chunk_rows or self._maximum_rows)) > 0
        if self._chunk_rows is None:
            breaks |= np.diff(ids) > 1
        return np.split(ids, np.flatnonzero(breaks) + 1)


def _rows_per_chunk(recipe: Recipe, stored: Mapping[str, StoredTensor]) -> int | None:
    """Returns the number of rows per chunk; None if rows can be read individually."""
    pieces = stored[recipe.sources[0]].pieces
    if pieces is None or recipe.stacked or recipe.transform is not identity:
        return None
    return pieces[0]
