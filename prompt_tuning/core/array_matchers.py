"""Trees of arrays that `==` can compare, for tests with mocks.

    model.assert_called_once_with(EqualArrays(batch), training=True)

A plain array in an expected call has no single truth value, and an object always equals
itself even if it was changed after the call.
"""

import dataclasses
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class EqualArrays:
    """Equals trees with the same structure, shapes and values as `expected`."""

    expected: Any

    # An array of NumPy on the left of `==` leaves the comparison to `__eq__`.
    __array_ufunc__ = None
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __eq__(self, other: object) -> bool:
        other = other.expected if isinstance(other, EqualArrays) else other
        if jax.tree.structure(self.expected) != jax.tree.structure(other):
            return False
        pairs = zip(jax.tree.leaves(self.expected), jax.tree.leaves(other), strict=True)
        return all(self._match(np.asarray(a), np.asarray(b)) for a, b in pairs)

    def _match(self, expected: np.ndarray, actual: np.ndarray) -> bool:
        return np.array_equal(expected, actual)


@dataclasses.dataclass(frozen=True, eq=False)
class CloseArrays(EqualArrays):
    """Equals trees with the same structure and shapes, and nearly the same values.

    Attributes:
      rtol: largest difference relative to the actual value.
      atol: largest absolute difference, in addition.
    """

    rtol: float = 1e-5
    atol: float = 1e-8

    def _match(self, expected: np.ndarray, actual: np.ndarray) -> bool:
        same = expected.shape == actual.shape
        return same and np.allclose(expected, actual, self.rtol, self.atol)
