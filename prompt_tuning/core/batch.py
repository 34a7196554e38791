"""Batches: the arrays that one step runs on, and their division among devices."""

import dataclasses
from typing import Any, NamedTuple

import jax

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.setting_hints import how_to_set


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Examples padded to one shape; with accumulation each array has a leading `A`.

    In a decoder-only row, target `i` is token `i`, predicted at the position before it.
    For `i = 0` that is the last prompt vector; without a prompt nothing predicts it,
    and its loss weight is zero (as it is if token 0 is BOS). In an encoder-decoder, the
    decoder's input `i`, which is target `i - 1`, predicts target `i`.

    A packed row holds up to `n` examples one after the other, its *segments*; `n` is
    the same for all batches of a plan. Each segment runs as if it were alone: it has
    its own prompt, its positions count from its start, and it attends to no other
    segment. In a packed encoder-decoder row, the decoder's input is the start token
    wherever `target_segment_ids` changes, instead of the last target of the segment
    before.

    If examples have `C` answers each, a batch may hold each prompt only once: `tokens`,
    `lengths`, `prefix_lengths` and `prompt_ids` then have `B / C` rows, and the `C`
    answers to each are consecutive rows of `targets`, even if the model is
    decoder-only.

    The fields have type Any because JAX transformations put their own leaves in them.

    Attributes:
      tokens: inputs, int32 `[B, T]`.
      lengths: number of real tokens in each row of `tokens`, all segments included,
        int32 `[B]`; 1 in a row that only fills the batch, so that no softmax is empty.
      targets: int32 `[B, U]`; the same as `tokens` in a decoder-only batch.
      loss_positions: indices of the learned targets, int32 `[B, m]`, padded with 0 in
        rows that have fewer.
      loss_weights: loss weights of these targets, float32 `[B, m]`, padded with 0.
      prefix_lengths: number of input tokens (BOS included) before a row's first
        completion token, int32 `[B]`, or before each segment's in packed rows, `[B,
        n]`, padded with 0; 0 in an encoder-decoder batch.
      segment_ids: segment of each token in packed rows, from 1, and 0 for padding,
        int32 `[B, T]`; None if each row is one example.
      prompt_ids: which of the `N` prompts each row has, int32 `[B]`, or each segment of
        a packed row, `[B, n]`; 0 without an example. None if there is one prompt, or if
        the rows are grouped by prompt, `B / N` rows for each.
      target_segment_ids: segment of each target in packed encoder-decoder rows,
        numbered like `segment_ids`, int32 `[B, U]`; else None.
      gold: correct class of each example that has `C` classes, int32 `[B]`, and -1
        without an example; all other arrays then have `B * C` rows, with an example's
        classes in consecutive rows. None if each row is an example.
      columns: data columns that an objective reads, by name (`DataSource.columns`),
        e.g. "advantages": values at the learned targets, float32 `[B, m]`, padded with
        0. A teacher's columns may be `[B, m, ...]` and have other types.
      example_weights: weight of each example that has classes, float32 `[B]`, 0 without
        an example; None if each weight is 1, or if each row is an example.
      real_rows: 1 for rows with an example, 0 for rows that only fill the batch, int32
        `[B]`; None if all rows have one.

    Examples:
      >>> batch = next(model.batches(pairs, batch_size=4))
      >>> batch.tokens.shape, batch.describe()
      ((4, 16), '4 x 16')
    """

    tokens: Any
    lengths: Any
    targets: Any
    loss_positions: Any
    loss_weights: Any
    prefix_lengths: Any
    segment_ids: Any = None
    prompt_ids: Any = None
    target_segment_ids: Any = None
    gold: Any = None
    example_weights: Any = None
    real_rows: Any = None
    columns: Any = dataclasses.field(default_factory=dict)

    @property
    def answers(self) -> int:
        """Number `C` of target rows for each row of `tokens`."""
        return self.targets.shape[-2] // self.tokens.shape[-2]

    def describe(self) -> str:
        """Describes the shape, e.g. "32 x 48" or, with targets, "32 x 48 + 16"."""
        sizes = " x ".join(map(str, self.tokens.shape))
        if self.targets.shape == self.tokens.shape:
            return sizes
        times = "" if self.answers == 1 else f"{self.answers} x "
        return f"{sizes} + {times}{self.targets.shape[-1]}"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LabelBatch:
    """Texts, each with the labels that may follow or answer it.

    The fields have type Any because JAX transformations put their own leaves in them.

    Attributes:
      tokens: texts, padded on the right, int32 `[B, T]`.
      lengths: number of real tokens of each text, int32 `[B]`; 0 requires a prompt.
      labels: tokens of each text's labels, padded on the right, int32 `[B, C, W]`.
      label_lengths: number of real tokens of each label, at least 1, int32 `[B, C]`.
      prompt_ids: which of the `N` prompts each text has, int32 `[B]`; None if there is
        one prompt.
    """

    tokens: Any
    lengths: Any
    labels: Any
    label_lengths: Any
    prompt_ids: Any = None

    def describe(self) -> str:
        """Describes the shape, e.g. "32 x 48, 6 labels x 4"."""
        rows, length = self.tokens.shape
        _, count, width = self.labels.shape
        return f"{rows} x {length}, {count} labels x {width}"


def value_columns(count: int) -> tuple[str, ...]:
    """Names the columns that hold the values of a head's `C` classes."""
    return tuple(f"class_value_{number}" for number in range(count))


class RowDivision(NamedTuple):
    """Devices that share the rows of a batch.

    Attributes:
      parts: number of equal parts.
      axes: mesh axes that divide the rows.
    """

    parts: int = 1
    axes: tuple[str, ...] = ()

    def check(self, rows: int) -> None:
        """Checks that a batch of `rows` rows divides evenly.

        Raises:
          InputError: if it does not; the message gives both numbers.
        """
        if rows % self.parts:
            raise InputError(
                f"a batch of {rows} rows cannot be divided among {self.parts} "
                f"devices along {' and '.join(self.axes)}; choose "
                f"a multiple: {how_to_set('DataSource.batch_size', self.parts)}"
            )


ONE_PART = RowDivision()
"""The division on a single device."""
