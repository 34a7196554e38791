"""Batches of arrays, built from examples in the order of a plan."""

import contextlib
import dataclasses
from collections.abc import Generator, Sequence
from typing import Any

import jax
import numpy as np

from prompt_tuning.data.examples import Examples
from prompt_tuning.data.plan import FILLING, BatchPlan, PlannedBatch
from prompt_tuning.data.readings import Example


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Examples padded to one shape; with accumulation each array has a leading `A`.

    Target `i` of a decoder-only row is token `i`, and is predicted by whatever stands
    before that token: for `i = 0` the last prompt vector, or nothing without a prompt
    (its weight is zero then, as it is when token 0 is BOS). Target `i` of an
    encoder-decoder is predicted by the decoder's input `i`, the target before it.

    The fields are typed Any because transformations put their own leaves in a tree.

    Attributes:
      tokens: inputs, int32 `[B, T]`.
      lengths: real tokens of each row of `tokens`, int32 `[B]`; 1 in a filling row, so
        that no softmax is over nothing.
      targets: int32 `[B, U]`; in a decoder-only batch the same as `tokens`.
      loss_positions: indices of the targets that carry weight, int32 `[B, m]`, 0 where
        a row has fewer.
      loss_weights: their weights, float32 `[B, m]`, 0 where a row has fewer.
      prefix_lengths: given tokens of each row (BOS included) before its first
        completion token, int32 `[B]`; 0 in an encoder-decoder batch and in packed rows.
      segment_ids: where a decoder-only row holds several examples one after the other,
        the number of each token's example, from 1, and 0 for padding, int32 `[B, T]`;
        None where each row is one example.
      prompt_ids: which of the `N` prompts each row has, int32 `[B]`; None where there
        is one, or where the rows are grouped by prompt, `B / N` of each.
    """

    tokens: Any
    lengths: Any
    targets: Any
    loss_positions: Any
    loss_weights: Any
    prefix_lengths: Any
    segment_ids: Any = None
    prompt_ids: Any = None


def build_batch(
    examples: Examples | Sequence[Example], planned: PlannedBatch, pad_id: int
) -> Batch:
    """Reads the planned rows and pads them; filling rows carry no weight.

    In a packed batch `segment_ids` tell the examples of a row apart, and positions of
    the loss count from the row's start.
    """
    count, packed = len(planned.rows), planned.rows.ndim == 2
    tokens = np.full((count, planned.input_length), pad_id, np.int32)
    batch = Batch(
        tokens=tokens,
        lengths=np.ones(count, np.int32),
        targets=np.full((count, planned.target_length), pad_id, np.int32),
        loss_positions=np.zeros((count, planned.positions), np.int32),
        loss_weights=np.zeros((count, planned.positions), np.float32),
        prefix_lengths=np.zeros(count, np.int32),
        segment_ids=np.zeros_like(tokens) if packed else None,
    )
    for place, row in enumerate(planned.rows.reshape(count, -1).tolist()):
        found = [examples[number] for number in row if number != FILLING]
        if found:
            _fill_row(batch, place, found)
        if found and packed:
            _number_segments(batch.segment_ids[place], found)
        elif found:
            batch.prefix_lengths[place] = found[0].prefix_length
    return batch


def _fill_row(batch: Batch, place: int, found: Sequence[Example]) -> None:
    """Writes examples into a row, one after the other."""
    inputs = np.concatenate([example.inputs for example in found])
    targets = np.concatenate([example.targets for example in found])
    weights = np.concatenate([example.weights for example in found])
    batch.tokens[place, : len(inputs)] = inputs
    batch.lengths[place] = len(inputs)
    batch.targets[place, : len(targets)] = targets
    positions = np.flatnonzero(weights)
    batch.loss_positions[place, : len(positions)] = positions
    batch.loss_weights[place, : len(positions)] = weights[positions]


def _number_segments(segment_ids: np.ndarray, found: Sequence[Example]) -> None:
    numbers = np.arange(1, len(found) + 1)
    of_tokens = np.repeat(numbers, [len(example.inputs) for example in found])
    segment_ids[: len(of_tokens)] = of_tokens


def stream_batches(
    examples: Examples,
    plan: BatchPlan,
    start: int,
    stop: int,
    *,
    pad_id: int,
    prefetch: int = 4,
) -> Generator[Batch, None, None]:
    """Batches `start` to `stop - 1` of the plan, in its order, read ahead by threads.

    With `plan.accumulate` above 1 the arrays of a batch are `[A, B, ...]`. What a
    reading thread raises is raised here. Close the iterator to stop the threads early.

    Args:
      examples: what the plan's rows are numbers of.
      plan: the order.
      start: index of the first batch.
      stop: one past the index of the last.
      pad_id: fills rows.
      prefetch: batches that are read ahead, and threads that read them; 0 reads each
        when it is asked for.
    """
    import grain

    def read(index: int) -> Batch:
        batch = build_batch(examples, plan.batch(index), pad_id)
        return batch if plan.accumulate == 1 else _stacked(batch, plan.accumulate)

    options = grain.ReadOptions(num_threads=prefetch, prefetch_buffer_size=prefetch)
    order = grain.MapDataset.range(start, stop).map(read)
    with contextlib.closing(iter(order.to_iter_dataset(options))) as batches:
        yield from batches


def _stacked(batch: Batch, accumulate: int) -> Batch:
    def split(array: np.ndarray) -> np.ndarray:
        return array.reshape(accumulate, -1, *array.shape[1:])

    return jax.tree.map(split, batch)


def real_token_share(batch: Batch) -> float:
    """Real tokens over all tokens of a batch's inputs: 1 where nothing is padding."""
    real_rows = np.any(batch.loss_weights != 0, axis=-1)
    return float(np.sum(batch.lengths * real_rows) / batch.tokens.size)
