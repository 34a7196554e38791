"""Rows of a stored table: those that are asked for are read, and no others."""

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

MOST_BYTES = 2**26
"""Bytes of rows that are read at once, where nothing makes them one piece."""


class StoredTable:
    """A table `[V, D]` in float32 that stays in its checkpoint.

    `table[index]` reads the rows that NumPy would give for an index of the first axis,
    each once. What needs all of it takes `numpy.asarray(table)`, which reads a block of
    rows after the other.

    Attributes:
      shape: `(V, D)`.
    """

    def __init__(
        self,
        path: str,
        shape: tuple[int, int],
        recipe: Recipe,
        stored: Mapping[str, StoredTensor],
    ):
        """Reads nothing yet; arguments as for `assemble`.

        Raises:
          InputError: as `check_recipe` does.
        """
        check_recipe(path, shape, recipe, stored)
        self.shape = shape
        self._read = functools.partial(
            assemble_parts, path, shape, np.dtype(np.float32), recipe, stored
        )
        self._most = max(1, MOST_BYTES // (4 * shape[1]))
        self._unpacked = _rows_unpacked(recipe, stored)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Float[np.ndarray, "*lead D"]:
        """Some rows.

        Raises:
          IndexError: for a row that there is not.
          InputError: if the checkpoint turns out to be damaged.
        """
        ids = np.arange(len(self))[index]
        wanted, places = np.unique(ids, return_inverse=True)
        rows = np.empty((len(wanted), self.shape[1]), np.float32)
        done = 0
        for group in self._groups(wanted):
            first, last = int(group[0]), int(group[-1]) + 1
            (read,) = self._read([(slice(first, last), slice(0, self.shape[1]))])
            rows[done : done + len(group)] = read[group - first]
            done += len(group)
        return rows[places.reshape(ids.shape)]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """All of it, for NumPy."""
        if copy is False:
            raise ValueError(
                "a table in a checkpoint cannot be an array without a copy"
            )
        return self[:].astype(dtype or np.float32, copy=False)

    def _groups(self, ids: Int[np.ndarray, "n"]) -> list[Int[np.ndarray, "_"]]:
        """Rising ids, cut into what is read at once.

        These follow each other, or lie in one piece of a file that is unpacked whole
        for any of them.
        """
        if not len(ids):
            return []
        breaks = np.diff(ids // (self._unpacked or self._most)) > 0
        if self._unpacked is None:
            breaks |= np.diff(ids) > 1
        return np.split(ids, np.flatnonzero(breaks) + 1)


def _rows_unpacked(recipe: Recipe, stored: Mapping[str, StoredTensor]) -> int | None:
    """How many rows one piece of the file has; None where each can be read alone."""
    pieces = stored[recipe.sources[0]].pieces
    if pieces is None or recipe.stacked or recipe.transform is not identity:
        return None
    return pieces[0]
