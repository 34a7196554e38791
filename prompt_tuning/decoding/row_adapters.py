"""Projection adapters that differ from row to row, stacked in tables.

Entry 0 of each table changes nothing; rows without an adapter use it.
"""

import contextlib
import contextvars
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from prompt_tuning.core.adapted_rows import any_inactive, where_active
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.losses.output_head import soft_capped
from prompt_tuning.prompts.projection_adapters import (
    FrozenProjection,
    ProjectionAdapter,
)
from prompt_tuning.prompts.token_rows import HeadRows

_entries: contextvars.ContextVar[Int[Array, "R"] | None] = contextvars.ContextVar(
    "_entries", default=None
)


@contextlib.contextmanager
def row_entries(entries: Int[Array, "R"]) -> Iterator[None]:
    """Sets each row's table entry while a model is traced.

    Args:
      entries: entry of each row of a stream; all rows have the same number of
        positions.
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
    """Multiplies the positions of each row by the row's table entry."""
    scales = jnp.take(table, _entry_of_each_row(), axis=0, mode="clip")  # [R, out]
    rows = x.reshape(len(scales), -1, x.shape[-1])
    return (rows * scales[:, None].astype(x.dtype)).reshape(x.shape)


class RowLowRank(ProjectionAdapter):
    """`y + scaling * x @ a @ b` with different factors per row; see `LowRank`.

    Attributes:
      a: `[L, N, in, r]`; smaller ranks are padded with zeros.
      b: `[L, N, r, out]`.
      factor: the scalings, `[L, N]`.
      outputs: DoRA's output factors, `[L, N, out]`; 1 for LoRA entries, None without
        any DoRA.
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
        """Adds each row's low-rank product; DoRA then rescales the sum."""
        added = self._product(x).reshape(y.shape)
        if any_inactive():
            added = where_active(added)
        if self.outputs is None:
            return y + added
        bias = frozen.applied_bias()
        product = y if bias is None else y - bias.astype(y.dtype)
        change = _scale_rows(product, self.outputs[...] - 1)
        return y + change + _scale_rows(added, self.outputs[...])

    def _product(self, x: Float[Array, "n in"]) -> Float[Array, "R C out"]:
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
        # each row's in turn; on accelerators a single row is too little work.
        if jax.default_backend() == "cpu":
            return jax.lax.map(product, rows)
        return jax.vmap(product)(rows)


class RowExpertLowRank(nnx.Module):
    """`RowLowRank` for a projection of experts; see `ExpertLowRank`.

    Attributes:
      a: `[L, N, E, in, r]`; smaller ranks are padded with zeros.
      b: `[L, N, E, r, out]`, scaled.
    """

    def __init__(self, a: Float[Array, "L N E in r"], b: Float[Array, "L N E r out"]):
        axes = ("layers", "entries", "experts")
        self.a = nnx.Param(a, axes=(*axes, "adapter", "rank"))
        self.b = nnx.Param(b, axes=(*axes, "rank", "adapter"))

    def factors_of_experts(
        self,
    ) -> tuple[Float[Array, "E N in r"], Float[Array, "E N r out"]]:
        """Returns the factors of one block."""
        return self.a[...].swapaxes(0, 1), self.b[...].swapaxes(0, 1)

    def entries_of_positions(self, count: int) -> Int[Array, "n"]:
        """Returns the table entry of each of `n` positions, row after row."""
        entries = _entry_of_each_row()
        return jnp.repeat(entries, count // len(entries))


class RowOutputScale(ProjectionAdapter):
    """`y * scale` with a different scale per row; see `OutputScale`.

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
    """`(x * scale) @ kernel` with a different scale per row; see `InputScale`.

    Attributes:
      scale: `[L, N, in]`.
    """

    def __init__(self, scale: Float[Array, "L N in"]):
        self.scale = nnx.Param(scale, axes=("layers", "entries", "adapter"))

    def before(self, x: Float[Array, "n in"]) -> Float[Array, "n in"]:
        """Scales the input."""
        return _scale_rows(x, self.scale[...])


class RowBias(ProjectionAdapter):
    """Adds the difference between a row's trained bias and the frozen one.

    Attributes:
      change: `[L, N, out]`, or `[N, out]` for a layer outside the blocks.
    """

    def __init__(self, change: Float[Array, "*L N out"]):
        axes = ("layers", "entries", "adapter")[-change.ndim :]
        self.change = nnx.Param(change, axes=axes)

    def after(
        self, x: Float[Array, "*lead in"], y: Float[Array, "*lead out"]
    ) -> Float[Array, "*lead out"]:
        """Adds the difference."""
        del x
        entries = _entry_of_each_row()
        changes = jnp.take(self.change[...], entries, axis=0, mode="clip")  # [R, out]
        rows = y.reshape(len(entries), -1, y.shape[-1])
        return (rows + changes[:, None].astype(y.dtype)).reshape(y.shape)


class RowTokenRows(nnx.Module):
    """Embedding rows of tokens that differ from row to row; see `TokenRows`.

    Attributes:
      ids: ids of the tokens, `[N, n]`, padded with -1.
      rows: their embedding rows, `[N, n, D]`.
      head_ids: ids for a separate output head; None if the head is the table.
      head: rows of that head.
    """

    def __init__(
        self,
        ids: Int[Array, "N n"],
        rows: Float[Array, "N n D"],
        head_ids: Int[Array, "N m"] | None = None,
        head: Float[Array, "N m D"] | None = None,
    ):
        axes = ("entries", "adapter", "adapter")
        self.ids = nnx.Param(ids, axes=axes[:2])
        self.rows = nnx.Param(rows, axes=axes)
        self.head_ids = None if head_ids is None else nnx.Param(head_ids, axes=axes[:2])
        self.head = None if head is None else nnx.Param(head, axes=axes)

    def __call__(
        self, ids: Int[Array, "R C"], vectors: Float[Array, "R C D"]
    ) -> Float[Array, "R C D"]:
        """Replaces the vectors of these tokens, before any embedding multiplier."""
        entries = _entry_of_each_row()
        same = ids[..., None] == self.ids[...][entries][:, None]  # [R, C, n]
        replacements = self.rows[...][entries[:, None], jnp.argmax(same, axis=-1)]
        return jnp.where(
            same.any(-1)[..., None], replacements.astype(vectors.dtype), vectors
        )

    def row_logits(
        self,
        hidden: Float[Array, "R *positions D"],
        logits: Float[Array, "R *positions v"],
        config: ModelConfig,
    ) -> Float[Array, "R *positions V"]:
        """Replaces each row's logits of its tokens; other new tokens get -inf."""
        entries, total = _entry_of_each_row(), config.vocabulary_size
        ids, rows = self.ids, self.rows
        if self.head is not None and self.head_ids is not None:
            ids, rows = self.head_ids, self.head
        ids, rows = ids[...][entries], rows[...][entries]  # [R, n], [R, n, D]
        token_logits = jnp.einsum(
            "r...d,rnd->r...n",
            hidden,
            rows.astype(hidden.dtype),
            preferred_element_type=jnp.float32,
        )
        token_logits = soft_capped(token_logits, config.logit_soft_cap).reshape(
            len(ids), -1, ids.shape[1]
        )
        missing = [(0, 0)] * (logits.ndim - 1) + [(0, total - logits.shape[-1])]
        wide = jnp.pad(logits, missing, constant_values=-jnp.inf)
        by_row = wide.reshape(len(ids), -1, total)
        columns = jnp.where(ids < 0, total, ids)[:, None]  # past the end: dropped
        numbers = jnp.arange(len(ids))[:, None, None]
        places = jnp.arange(by_row.shape[1])[None, :, None]
        by_row = by_row.at[numbers, places, columns].set(token_logits, mode="drop")
        return by_row.reshape(wide.shape)

    def head_rows(self, *, tied: bool) -> HeadRows | None:
        """Returns None: no rows are common to the whole batch."""
        del tied
        return None
