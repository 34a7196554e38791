"""Adapters of projections that differ from row to row, stacked in a resident table.

Entry 0 of each table changes nothing: rows without an adapter use it.
"""

import contextlib
import contextvars
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from prompt_tuning.prompts.projection_adapters import (
    FrozenProjection,
    ProjectionAdapter,
)

_entries: contextvars.ContextVar[Int[Array, "R"] | None] = contextvars.ContextVar(
    "_entries", default=None
)


@contextlib.contextmanager
def row_entries(entries: Int[Array, "R"]) -> Iterator[None]:
    """Sets the table's entry of each row while a model is traced.

    Args:
      entries: numbers of the rows of a stream; all have the same number of positions.
    """
    token = _entries.set(entries)
    try:
        yield
    finally:
        _entries.reset(token)


def _entry_of_each_row() -> Int[Array, "R"]:
    entries = _entries.get()
    assert entries is not None  # the engine sets it around each use of the model
    return entries


def _scale_rows(x: Float[Array, "n out"], table: Float[Array, "N out"]) -> Array:
    """Multiplies the positions of each row, row after row, by its entry of a table."""
    scales = jnp.take(table, _entry_of_each_row(), axis=0, mode="clip")  # [R, out]
    rows = x.reshape(len(scales), -1, x.shape[-1])
    return (rows * scales[:, None].astype(x.dtype)).reshape(x.shape)


class RowLowRank(ProjectionAdapter):
    """`y + scaling * x @ a @ b` with factors of each row; see `LowRank`.

    Attributes:
      a: `[L, N, in, r]`; smaller ranks are padded with zeros.
      b: `[L, N, r, out]`.
      factor: the scalings, `[L, N]`.
      outputs: DoRA's factors of the outputs, `[L, N, out]`; 1 for rows of LoRA, and
        None without any DoRA.
    """

    def __init__(
        self,
        a: Float[Array, "L N in r"],
        b: Float[Array, "L N r out"],
        scaling: Float[Array, "L N"],
        outputs: Float[Array, "L N out"] | None = None,
    ):
        axes = ("layers", "entries", "adapter")
        self.outputs = None if outputs is None else nnx.Param(outputs, axes=axes)
        self.a = nnx.Param(a, axes=("layers", "entries", "adapter", "rank"))
        self.b = nnx.Param(b, axes=("layers", "entries", "rank", "adapter"))
        self.factor = nnx.Param(scaling, axes=("layers", "entries"))

    def adapt(
        self,
        x: Float[Array, "n in"],
        y: Float[Array, "n out"],
        frozen: FrozenProjection,
    ) -> Float[Array, "n out"]:
        """Adds the low-rank product of each row's factors; DoRA rescales the sum."""
        added = self._product(x).reshape(y.shape)
        if self.outputs is None:
            return y + added
        bias = 0 if frozen.bias is None else frozen.bias[...].astype(y.dtype)
        product = y - bias
        change = _scale_rows(product, self.outputs[...] - 1)
        return y + change + _scale_rows(added, self.outputs[...])

    def _product(self, x: Float[Array, "n in"]) -> Float[Array, "R C out"]:
        """Returns the low-rank product of each row's factors."""
        tables = (self.a[...], self.b[...], self.factor[...])

        def product(
            given: tuple[Float[Array, "C in"], Int[Array, ""]],
        ) -> Float[Array, "C out"]:
            positions, entry = given
            a, b, factor = (
                jax.lax.dynamic_index_in_dim(table, entry, keepdims=False)
                for table in tables
            )
            low = positions @ a.astype(x.dtype)  # [C, r]
            return low @ b.astype(x.dtype) * factor.astype(x.dtype)

        entries = _entry_of_each_row()
        rows = (x.reshape(len(entries), -1, x.shape[-1]), entries)  # [R, C, in]
        # CPUs gather the factors of all rows several times more slowly than they read
        # each row's own in turn; accelerators have too little work in a row.
        if jax.default_backend() == "cpu":
            return jax.lax.map(product, rows)
        return jax.vmap(product)(rows)


class RowOutputScale(ProjectionAdapter):
    """`y * scale` with a scale of each row; see `OutputScale`.

    Attributes:
      scale: `[L, N, out]`.
    """

    def __init__(self, scale: Float[Array, "L N out"]):
        self.scale = nnx.Param(scale, axes=("layers", "entries", "adapter"))

    def after(
        self, x: Float[Array, "n in"], y: Float[Array, "n out"]
    ) -> Float[Array, "n out"]:
        """Scales the output, including the bias."""
        del x
        return _scale_rows(y, self.scale[...])


class RowInputScale(ProjectionAdapter):
    """`(x * scale) @ kernel` with a scale of each row; see `InputScale`.

    Attributes:
      scale: `[L, N, in]`.
    """

    def __init__(self, scale: Float[Array, "L N in"]):
        self.scale = nnx.Param(scale, axes=("layers", "entries", "adapter"))

    def before(self, x: Float[Array, "n in"]) -> Float[Array, "n in"]:
        """Scales the input."""
        return _scale_rows(x, self.scale[...])
