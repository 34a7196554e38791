"""Embedding tables and output heads `[V, D]` in few bits.

They are stored as the transposes of kernels: a token's numbers are consecutive, and
groups of them share a scale. Only the rows that are looked up are widened, and in
products one part of the vocabulary at a time.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from prompt_tuning.core.quantization.nibbles import LARGEST_CODE, values_of_codes
from prompt_tuning.core.quantization.stores import (
    Part,
    is_packed,
    is_quantized,
    part_path,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedTable:
    """A table that widens its rows on request; see `stores` for its arrays.

    Attributes:
      codes: `[V, D]`, or `[V, D / 2]` with two numbers per byte.
      scale: `[V]` or `[V, groups]`.
      codebook: values of the codes, `[16]`, or None.
      zero: codes that stand for 0, `[V, groups]`, or None.
    """

    # JAX also puts descriptions of arrays in the place of the arrays.
    codes: Any
    scale: Any
    codebook: Any = None
    zero: Any = None

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and of columns, `(V, D)`."""
        rows, columns = self.codes.shape
        return rows, 2 * columns if is_packed(self.codes) else columns

    def __getitem__(self, ids: Int[Array, "*lead"]) -> Float32[Array, "*lead D"]:
        """Looks up rows; an id past the end gives the last row."""
        flat = ids.reshape(-1)
        rows = self._map(lambda x: jnp.take(x, flat, axis=0, mode="clip")).widened()
        return rows.reshape(*ids.shape, -1)

    def part(self, start: Int[Array, ""] | int, size: int) -> Float32[Array, "size D"]:
        """Returns consecutive rows."""
        rows = self._map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size))
        # As in `multiply`, the barrier keeps the widening out of a product.
        return jax.lax.optimization_barrier(rows.widened())

    def widened(self) -> Float32[Array, "V D"]:
        """Returns all rows."""
        count = len(self)
        scale = self.scale.astype(jnp.float32).reshape(count, -1, 1)
        zero = None if self.zero is None else self.zero.reshape(scale.shape)
        grouped = self.codes.reshape(count, scale.shape[1], -1)
        if is_packed(self.codes):
            # [V, groups, 2, half]; XLA concatenates the halves of rows more slowly.
            halves = grouped[:, :, None] >> jnp.array([[0], [4]], jnp.uint8)
            codes = (halves & LARGEST_CODE).reshape(*scale.shape[:2], -1)
            values = values_of_codes(codes, self.codebook, zero)
        else:
            values = grouped.astype(jnp.float32)
            values = values if zero is None else values - zero.astype(jnp.float32)
        return (values * scale).reshape(self.shape)

    def _map(self, function: Callable[[Array], Array]) -> "QuantizedTable":
        zero = None if self.zero is None else function(self.zero)
        return QuantizedTable(
            function(self.codes), function(self.scale), self.codebook, zero
        )


Table = Float[Array, "V D"] | QuantizedTable
"""A table in any store."""


def table_at(parameters: Mapping[str, Any], path: str) -> Table:
    """Returns the table at a path of a model's parameters."""
    table = jnp.asarray(parameters[path])
    if not is_quantized(table):
        return table
    names: tuple[Part, ...] = ("scale", "codebook", "zero")
    parts = (parameters.get(part_path(path, name)) for name in names)
    scale, codebook, zero = (x if x is None else jnp.asarray(x) for x in parts)
    assert scale is not None  # as every quantized array has
    return QuantizedTable(table, scale, codebook, zero)


def wide_table(parameters: Mapping[str, Any], path: str) -> Float32[np.ndarray, "V D"]:
    """Returns the rows of the table at a path of a model's parameters."""
    table = table_at(parameters, path)
    wide = table.widened() if isinstance(table, QuantizedTable) else table
    return np.asarray(wide, np.float32)
