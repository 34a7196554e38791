"""The batch: what a step is computed on."""

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Examples padded to one shape; with accumulation each array has a leading `A`.

    Target `i` of a decoder-only row is token `i`, and is predicted by whatever stands
    before that token: for `i = 0` the last prompt vector, or nothing without a prompt
    (its weight is zero then, as it is when token 0 is BOS). Target `i` of an
    encoder-decoder is predicted by the decoder's input `i`, the target before it.

    A packed row holds several examples, its *segments*, one after the other: at most
    `n`, the same for all batches of a plan. Each is run as if it stood alone: with a
    prompt of its own, with positions from its own start, and seeing no other. In a
    packed encoder-decoder row a segment's first target is predicted by the start token,
    not by the last target of the segment before: where `target_segment_ids` change, the
    decoder's input is the start token.

    The fields are typed Any because transformations put their own leaves in a tree.

    Attributes:
      tokens: inputs, int32 `[B, T]`.
      lengths: real tokens of each row of `tokens`, of all its segments, int32 `[B]`; 1
        in a filling row, so that no softmax is over nothing.
      targets: int32 `[B, U]`; in a decoder-only batch the same as `tokens`.
      loss_positions: indices of the targets that carry weight, int32 `[B, m]`, 0 where
        a row has fewer.
      loss_weights: their weights, float32 `[B, m]`, 0 where a row has fewer.
      prefix_lengths: given tokens of each row (BOS included) before its first
        completion token, int32 `[B]`; in packed rows of each segment, `[B, n]`, 0 where
        a row has fewer; 0 in an encoder-decoder batch.
      segment_ids: of packed rows, the number of each token's segment, from 1, and 0 for
        padding, int32 `[B, T]`; None where each row is one example.
      prompt_ids: which of the `N` prompts each row has, int32 `[B]`, and in packed rows
        each segment, `[B, n]`; 0 where there is no example. None where there is one
        prompt, or where the rows are grouped by prompt, `B / N` of each.
      target_segment_ids: of packed encoder-decoder rows, the number of each target's
        segment, as in `segment_ids`, int32 `[B, U]`; else None.
      gold: of examples with `C` classes, the right one of each example, int32 `[B]`,
        and -1 where there is no example; the rows of all other arrays are then `B * C`,
        the classes of an example one after the other. None where a row is an example.
      columns: data columns that an objective reads, by name (`DataSource.columns`),
        such as "advantages": values of the learned targets, float32 `[B, m]`, 0 where
        a row has fewer.
      example_weights: of examples with classes, what each weighs, float32 `[B]`, 0
        where there is no example; None where each weighs 1, or a row is an example.
      real_rows: 1 where a row holds an example, 0 where it is there to fill the batch,
        int32 `[B]`; None where all hold one.
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
