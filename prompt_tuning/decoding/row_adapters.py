"""Adapters of projections that differ from row to row, stacked in a resident table.

Entry 0 of each table changes nothing: rows without an adapter use it.
"""

import contextlib
import contextvars
from collections.abc import Iterator

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from prompt_tuning.prompts.projection_adapters import ProjectionAdapter

_entries: contextvars.ContextVar[Int[Array, "*rows"] | None] = contextvars.ContextVar(
    "_entries", default=None
)


@contextlib.contextmanager
def row_entries(entries: Int[Array, "*rows"]) -> Iterator[None]:
    """Sets the table's entry of each position, or of all, while a model is traced.

    Args:
      entries: numbers `[n]` for the `n` positions of a stream, or one for all of them.
    """
    token = _entries.set(entries)
    try:
        yield
    finally:
        _entries.reset(token)


def _select(table: Float[Array, "N *rest"]) -> Float[Array, "*lead"]:
    """Returns the entry of each position, or the one of all positions."""
    entries = _entries.get()
    assert entries is not None  # the engine sets it around each use of the model
    return jnp.take(table, entries, axis=0, mode="clip")


class RowLowRank(ProjectionAdapter):
    """`y + scaling * x @ a @ b` with factors of each row; see `LowRank`.

    Attributes:
      a: `[L, N, in, r]`; smaller ranks are padded with zeros.
      b: `[L, N, r, out]`.
      scaling: `[L, N]`.
    """

    def __init__(
        self,
        a: Float[Array, "L N in r"],
        b: Float[Array, "L N r out"],
        scaling: Float[Array, "L N"],
    ):
        self.a = nnx.Param(a, axes=("layers", "entries", "adapter", "rank"))
        self.b = nnx.Param(b, axes=("layers", "entries", "rank", "adapter"))
        self.factor = nnx.Param(scaling, axes=("layers", "entries"))

    def after(
        self, x: Float[Array, "*lead in"], y: Float[Array, "*lead out"]
    ) -> Float[Array, "*lead out"]:
        """Adds the low-rank product of each row's factors."""
        a = _select(self.a[...]).astype(x.dtype)
        b = _select(self.b[...]).astype(x.dtype)
        scaling = _select(self.factor[...]).astype(x.dtype)
        if a.ndim == 2:  # one entry for all positions
            return y + ((x @ a) @ b) * scaling
        low = jnp.einsum("ni,nir->nr", x, a)
        return y + jnp.einsum("nr,nro->no", low, b) * scaling[:, None]


class RowOutputScale(ProjectionAdapter):
    """`y * scale` with a scale of each row; see `OutputScale`.

    Attributes:
      scale: `[L, N, out]`.
    """

    def __init__(self, scale: Float[Array, "L N out"]):
        self.scale = nnx.Param(scale, axes=("layers", "entries", "adapter"))

    def after(
        self, x: Float[Array, "*lead in"], y: Float[Array, "*lead out"]
    ) -> Float[Array, "*lead out"]:
        """Scales the output, including the bias."""
        del x
        return y * _select(self.scale[...]).astype(y.dtype)


class RowInputScale(ProjectionAdapter):
    """`(x * scale) @ kernel` with a scale of each row; see `InputScale`.

    Attributes:
      scale: `[L, N, in]`.
    """

    def __init__(self, scale: Float[Array, "L N in"]):
        self.scale = nnx.Param(scale, axes=("layers", "entries", "adapter"))

    def before(self, x: Float[Array, "*lead in"]) -> Float[Array, "*lead in"]:
        """Scales the input."""
        return x * _select(self.scale[...]).astype(x.dtype)
