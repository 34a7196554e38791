"""What is known of the rows of a batch besides their embedded tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from prompt_tuning.core import masks
from prompt_tuning.core.batch import Batch
from prompt_tuning.models.attention import check_groups
from prompt_tuning.sharding import collectives


class RowInfo(NamedTuple):
    """Rows of text, each of one example or, packed, of up to `n`; see `Batch`.

    Attributes:
      lengths: real tokens of each row.
      prefix_lengths: given tokens of each row, or of each example of a packed one.
      segment_ids: number of each token's example, from 1, 0 for padding; None where a
        row is one example.
      prompt_ids: which prompt each row has, or each example of a packed one; None where
        there is one, or where rows are grouped by prompt.
      soft: which vector of the prompt stands at each place, negative for text; read
        where prompts are placed by a template.
    """

    lengths: Int[Array, "B"]
    prefix_lengths: Int[Array, "B"] | Int[Array, "B n"]
    segment_ids: Int[Array, "B T"] | None = None
    prompt_ids: Int[Array, "B"] | Int[Array, "B n"] | None = None
    vector_ids: Int[Array, "B T"] | None = None

    @classmethod
    def from_inputs(cls, batch: Batch, vocabulary_size: int) -> "RowInfo":
        """Those of a batch's `tokens`."""
        return cls(
            batch.lengths,
            batch.prefix_lengths,
            batch.segment_ids,
            batch.prompt_ids,
            batch.tokens - vocabulary_size,
        )

    @classmethod
    def from_targets(cls, batch: Batch) -> "RowInfo":
        """Those of an encoder-decoder batch's `targets`, of which nothing is given."""
        count, length = batch.targets.shape
        return cls(
            jnp.full(count, length),
            jnp.zeros_like(batch.prefix_lengths),
            batch.target_segment_ids,
            batch.prompt_ids,
        )

    @property
    def packed(self) -> bool:
        """Whether a row holds several examples."""
        return self.segment_ids is not None

    @property
    def examples(self) -> int:
        """Most examples of a row, `n`."""
        return self.prefix_lengths.shape[1] if self.prefix_lengths.ndim == 2 else 1

    def segments(self, length: int) -> Int[Array, "B T"]:
        """Number of each token's example, 0 for padding, packed or not."""
        if self.segment_ids is not None:
            return self.segment_ids
        return masks.real_tokens(self.lengths, length).astype(jnp.int32)

    def example_lengths(self, length: int) -> Int[Array, "B n"]:
        """Real tokens of each example."""
        numbers = jnp.arange(1, self.examples + 1)
        return (self.segments(length)[..., None] == numbers).sum(1)

    def positions_in_example(self, length: int) -> Int[Array, "#B T"]:
        """How many tokens of its own example stand before each token."""
        if self.segment_ids is None:
            return jnp.arange(length)[None]
        return positions_in_segment(self.segment_ids)

    def is_given(self, length: int) -> Bool[Array, "B T"]:
        """Which tokens are given rather than completed."""
        if self.segment_ids is None:
            return masks.real_tokens(self.prefix_lengths, length)
        own = jnp.maximum(self.segment_ids - 1, 0)
        of_token = jnp.take_along_axis(self.prefix_lengths, own, axis=1)
        return (self.positions_in_example(length) < of_token) & (self.segment_ids > 0)


def positions_in_segment(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """How many tokens of its own example stand before each token of a packed row."""
    place = jnp.arange(segment_ids.shape[1])
    starts = jnp.diff(segment_ids, axis=1, prepend=-1) != 0
    return place - jax.lax.cummax(jnp.where(starts, place, 0), axis=1)


def check_groupable(rows: int, n: int) -> None:
    """Refuses to group by `n` prompts what a mesh divides: each device has some rows.

    Raises:
      ValueError: with what to say in place of groups.
    """
    if collectives.row_range(rows).total != rows:
        raise ValueError(
            f"rows that a mesh divides cannot be grouped by {n} prompts; say in "
            "Batch.prompt_ids which prompt each row has"
        )


def select_prompts(
    stacked: Float[Array, "N *rest"],
    rows: int,
    prompt_ids: Int[Array, "B"] | None,
) -> Float[Array, "_ *rest"]:
    """What each of `rows` rows has of `N` things; one for all if `N` is 1."""
    if len(stacked) == 1:
        return stacked
    if prompt_ids is not None:
        return stacked[prompt_ids]
    check_groupable(rows, len(stacked))
    check_groups(rows, len(stacked))
    return jnp.repeat(stacked, rows // len(stacked), axis=0)
