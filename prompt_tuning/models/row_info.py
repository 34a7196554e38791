"""Lengths, segments and prompts of a batch's rows, as the models need them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from prompt_tuning.core import masks
from prompt_tuning.core.batch import Batch
from prompt_tuning.models.attention_products import check_groups
from prompt_tuning.sharding import collectives


class RowInfo(NamedTuple):
    """Rows of text, each with one example or, if packed, with up to `n`; see `Batch`.

    Attributes:
      lengths: number of real tokens of each row.
      prefix_lengths: number of input tokens of each row, or of each example of a packed
        row.
      segment_ids: example of each token, from 1, and 0 for padding; None if each row is
        one example.
      prompt_ids: prompt of each row, or of each example of a packed row; None if there
        is one prompt, or if rows are grouped by prompt.
      vector_ids: index of the prompt vector at each position, negative for text; only
        if a template inserts prompt vectors.
    """

    lengths: Int[Array, "B"]
    prefix_lengths: Int[Array, "B"] | Int[Array, "B n"]
    segment_ids: Int[Array, "B T"] | None = None
    prompt_ids: Int[Array, "B"] | Int[Array, "B n"] | None = None
    vector_ids: Int[Array, "B T"] | None = None

    @classmethod
    def from_inputs(cls, batch: Batch, vocabulary_size: int) -> "RowInfo":
        """Describes the rows of a batch's `tokens`."""
        return cls(
            batch.lengths,
            batch.prefix_lengths,
            batch.segment_ids,
            batch.prompt_ids,
            batch.tokens - vocabulary_size,
        )

    @classmethod
    def from_targets(cls, batch: Batch) -> "RowInfo":
        """Describes the rows of an encoder-decoder's targets; none of them is input."""
        count, length = batch.targets.shape
        return cls(
            jnp.full(count, length),
            jnp.zeros_like(batch.prefix_lengths),
            batch.target_segment_ids,
            batch.prompt_ids,
        )

    @property
    def packed(self) -> bool:
        """Whether a row holds more than one example."""
        return self.segment_ids is not None

    @property
    def examples(self) -> int:
        """Maximum number of examples in a row, `n`."""
        return self.prefix_lengths.shape[1] if self.prefix_lengths.ndim == 2 else 1

    def segments(self, length: int) -> Int[Array, "B T"]:
        """Numbers each token's example from 1, 0 for padding, whether packed or not."""
        if self.segment_ids is not None:
            return self.segment_ids
        return masks.real_tokens(self.lengths, length).astype(jnp.int32)

    def example_lengths(self, length: int) -> Int[Array, "B n"]:
        """Counts the real tokens of each example."""
        numbers = jnp.arange(1, self.examples + 1)
        # [B, T, n] -> [B, n]
        return (self.segments(length)[..., None] == numbers).sum(1)

    def positions_in_example(self, length: int) -> Int[Array, "#B T"]:
        """Counts the tokens before each token in its example."""
        if self.segment_ids is None:
            return jnp.arange(length)[None]
        return positions_in_segment(self.segment_ids)

    def of_examples(
        self, values: Int[Array, "B n"], positions: Int[Array, "#B m"]
    ) -> Int[Array, "B m"]:
        """Returns the value of the example that each position of a row belongs to."""
        if self.segment_ids is None:
            return jnp.broadcast_to(values, (len(values), positions.shape[1]))
        # [B, T] -> [B, m], from 0; padding belongs to the first.
        example = jnp.take_along_axis(self.segment_ids, positions, axis=1) - 1
        return jnp.take_along_axis(values, jnp.maximum(example, 0), axis=1)

    def is_input(self, length: int) -> Bool[Array, "B T"]:
        """Marks the input tokens, as opposed to completions."""
        if self.segment_ids is None:
            return masks.real_tokens(self.prefix_lengths, length)
        # [B, n] -> [B, T]: given tokens of each token's example.
        inputs = self.of_examples(self.prefix_lengths, jnp.arange(length)[None])
        return (self.positions_in_example(length) < inputs) & (self.segment_ids > 0)


def positions_in_segment(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Counts the tokens before each token in its segment of a packed row."""
    position = jnp.arange(segment_ids.shape[1])  # [T]
    starts = jnp.diff(segment_ids, axis=1, prepend=-1) != 0  # [B, T]
    # The running maximum is the position at which the current segment starts.
    return position - jax.lax.cummax(jnp.where(starts, position, 0), axis=1)


def check_groupable(rows: int, n: int) -> None:
    """Checks that rows can be grouped by `n` prompts; a mesh must not shard them.

    Raises:
      ValueError: if each device holds only some of the rows.
    """
    if collectives.row_range(rows).total != rows:
        raise ValueError(
            f"rows that a mesh divides cannot be grouped by {n} prompts; set "
            "Batch.prompt_ids to the prompt of each row"
        )


def select_prompts(
    stacked: Float[Array, "N *rest"],
    rows: int,
    prompt_ids: Int[Array, "B"] | None,
) -> Float[Array, "_ *rest"]:
    """Selects each row's entry among `N` prompts; all rows share a single one."""
    if len(stacked) == 1:
        return stacked
    if prompt_ids is not None:
        return stacked[prompt_ids]
    check_groupable(rows, len(stacked))
    check_groups(rows, len(stacked))
    return jnp.repeat(stacked, rows // len(stacked), axis=0)


def last_vectors(
    last: Float[Array, "N D"], positions: Int[Array, "B m"], rows: RowInfo
) -> Float[Array, "#B #m D"]:
    """Selects the last vector of the prompt before each of some tokens."""
    ids, count = rows.prompt_ids, len(positions)
    if len(last) == 1:
        return last[:, None]  # [1, 1, D]
    if ids is not None and ids.ndim == 2:
        assert rows.segment_ids is not None  # only packed rows have [B, n] prompts
        segment = jnp.take_along_axis(rows.segment_ids, positions, axis=1)  # [B, m]
        prompt = jnp.take_along_axis(ids, jnp.maximum(segment - 1, 0), axis=1)
        return last[prompt]  # [B, m, D]
    return select_prompts(last, count, ids)[:, None]  # [B, 1, D]
