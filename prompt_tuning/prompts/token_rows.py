"""Trained rows of single tokens, instead of a frozen embedding table's."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from prompt_tuning.core.model_config import ModelConfig

NAME = "tokens"
"""Name of the rows among the adapters of the embedding table."""


class HeadRows(NamedTuple):
    """Rows of an output head and their tokens.

    Attributes:
      rows: `[n, D]`.
      ids: id of each row's token.
    """

    rows: Float[Array, "n D"]
    ids: tuple[int, ...]


class TokenRows(nnx.Module):
    """Rows of some tokens, trained while the rest of the table is frozen.

    Attributes:
      rows: rows of the embedding table, `[n, D]`.
      ids: id of each.
      head: rows of an untied output head, `[m, D]`, or None.
      head_ids: id of each of these.
    """

    def __init__(
        self,
        rows: Float[Array, "n D"],
        ids: tuple[int, ...],
        head: Float[Array, "m D"] | None = None,
        head_ids: tuple[int, ...] = (),
    ):
        axes = ("adapter", "adapter")
        self.rows = nnx.Param(rows, axes=axes)
        self.head = None if head is None else nnx.Param(head, axes=axes)
        self.ids, self.head_ids = ids, head_ids

    def __call__(
        self, ids: Int[Array, "*lead"], vectors: Float[Array, "*lead D"]
    ) -> Float[Array, "*lead D"]:
        """Replaces the vectors of the tokens among `ids`, before any multiplier."""
        same = ids[..., None] == jnp.asarray(self.ids)  # [*lead, n]
        trained = jnp.take(self.rows[...], jnp.argmax(same, axis=-1), axis=0)
        return jnp.where(
            same.any(-1)[..., None], trained.astype(vectors.dtype), vectors
        )

    def row_logits(
        self,
        hidden: Float[Array, "*lead D"],
        logits: Float[Array, "*lead V"],
        config: ModelConfig,
    ) -> Float[Array, "*lead V"]:
        """Changes each row's logits; does nothing here, see `head_rows`."""
        del hidden, config
        return logits

    def head_rows(self, *, tied: bool) -> HeadRows | None:
        """Returns the rows of the output head; None if it has none of them.

        A tied head is the embedding table and shares its rows.
        """
        if tied:
            return HeadRows(self.rows[...], self.ids)
        return None if self.head is None else HeadRows(self.head[...], self.head_ids)
