"""Concatenates the arrays of micro-batches into one with all of their rows."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from prompt_tuning.core.errors import InputError


class MicrobatchConcatenation:
    """Joins the lists of arrays of micro-batches along their rows.

    An array's rows are the dimension that is larger in a trace of all rows.
    """

    def __init__(
        self, each: Sequence[Any], joined: Sequence[Any], differs: Sequence[bool]
    ):
        """Finds the rows of each array.

        Args:
          each: shapes of a micro-batch's arrays.
          joined: shapes of the same arrays with the rows of all micro-batches.
          differs: whether each array differs among micro-batches, so that it cannot be
            joined without rows.

        Raises:
          InputError: if an array cannot be joined.
        """
        self._axes = [
            _axis(one.shape, other.shape)
            for one, other in zip(each, joined, strict=True)
        ]
        if any(
            axis is None and other
            for axis, other in zip(self._axes, differs, strict=True)
        ):
            raise InputError(
                "Pipeline.joined_p2 is True, but the gradients of weights need sums "
                "or random numbers of each micro-batch (a prompt that all rows share, "
                "dropout), which cannot be joined: set it to False"
            )

    def __call__(self, parts: Sequence[Sequence[Any]]) -> list[Any]:
        """Joins the arrays of each micro-batch."""
        return [
            arrays[0] if axis is None else jnp.concatenate(arrays, axis)
            for axis, arrays in zip(self._axes, zip(*parts, strict=True), strict=True)
        ]


def _axis(part: Sequence[int], joined: Sequence[int]) -> int | None:
    """Returns the dimension in which two shapes differ; None if they are equal."""
    pairs = enumerate(zip(part, joined, strict=True))
    return next((axis for axis, (one, whole) in pairs if one != whole), None)
