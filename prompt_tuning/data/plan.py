"""Which rows make which batch: a plan that every process computes alike.

The plan follows from the length table, the seed and the index of a batch alone: no
process tells another anything, and a run that resumes goes on at its index.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, Integer

from prompt_tuning.errors import InputError

LENGTH_BUCKETS = (
    *(16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048),
    *(3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768),
)
"""Powers of two and the middles between them: at most a third of a row is padding,
beyond the first few."""

MULTIPLE = 8
"""Lengths and counts are rounded up to it, the tile that accelerators work in."""

FILLING = -1
"""Stands for no row, where the last batch of an epoch has too few."""


@dataclasses.dataclass(frozen=True)
class PlannedBatch:
    """The rows of one batch that this process reads, and the shape they are padded to.

    Attributes:
      rows: example numbers, `[A * B]` (`A` micro-batches of `B` rows, this process's
        share of each, one after the other); `FILLING` (-1) where there is none.
      input_length: `T`.
      target_length: `U`.
      positions: `m`, room for the targets of a row that carry weight.
    """

    rows: Int64[np.ndarray, "R"]
    input_length: int
    target_length: int
    positions: int


class BatchShape(NamedTuple):
    """What the arrays of a batch are padded to: `T`, `U` and `m`."""

    input_length: int
    target_length: int
    positions: int


class _Epoch(NamedTuple):
    """All batches of one epoch: `rows [n, A * B]` and the bucket of each, `[n]`."""

    rows: Int64[np.ndarray, "n R"]
    buckets: Int64[np.ndarray, "n"]


class BatchPlan:
    """Batches of rows of like length, every row once in each epoch.

    Rows are put in buckets by input length. A bucket's rows that do not fill a batch go
    up into the next bucket; the last batch of the highest is filled with `FILLING`.
    Batches of one bucket all have one shape, so a step compiles once for each bucket.

    Attributes:
      batch_size: rows of a micro-batch, over all processes.
      accumulate: micro-batches of a batch, all of one bucket.
      batches_per_epoch: batches that hold every row once.
    """

    def __init__(
        self,
        input_lengths: Integer[np.ndarray, "E"],
        target_lengths: Integer[np.ndarray, "E"],
        weight_counts: Integer[np.ndarray, "E"],
        *,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        same_tokens: bool,
        length_buckets: Sequence[int] = LENGTH_BUCKETS,
        maximum_length: int | None = None,
        accumulate: int = 1,
        process_index: int = 0,
        process_count: int = 1,
    ):
        """Sorts the rows into buckets.

        Args:
          input_lengths: of each example; see `Examples`.
          target_lengths: of each example.
          weight_counts: targets of each example whose weight is not zero.
          batch_size: rows of a micro-batch, over all processes.
          seed: of the order.
          shuffle: whether each epoch has an order of its own.
          same_tokens: whether inputs and targets are the same row (decoder-only), so
            that both are padded alike.
          length_buckets: increasing lengths to pad to; those beyond the longest row
            are replaced by its length, rounded up to a multiple of 8.
          maximum_length: no row is padded beyond it: the model's positions minus the
            prompt's vectors.
          accumulate: `A`, micro-batches of a batch.
          process_index: which share of each micro-batch this process reads.
          process_count: among how many processes the rows of one are shared.

        Raises:
          InputError: if there is no row, or an argument is out of range.
        """
        _check_arguments(batch_size, accumulate, process_index, process_count)
        _check_lengths(input_lengths)
        self.batch_size = batch_size
        self.accumulate = accumulate
        self._seed = seed
        self._shuffle = shuffle
        self._process = process_index, process_count
        self._rows_per_batch = accumulate * batch_size
        self.batches_per_epoch = -(-len(input_lengths) // self._rows_per_batch)
        tops = bucket_tops(length_buckets, int(input_lengths.max()), maximum_length)
        bucket_of_row = np.searchsorted(tops, input_lengths)
        used = np.unique(bucket_of_row)
        self._members = [np.flatnonzero(bucket_of_row == bucket) for bucket in used]
        highest = _highest_by_bucket(
            np.stack([target_lengths, weight_counts]),
            self._members,
            self._rows_per_batch,
        )
        end = int(np.iinfo(np.int64).max) if maximum_length is None else maximum_length
        self._shapes = []
        for top, (targets, weights) in zip(tops[used].tolist(), highest, strict=True):
            length = top if same_tokens else min(round_up(targets), end)
            shape = BatchShape(top, length, min(round_up(weights), length))
            self._shapes.append(shape)
        # A reader that runs ahead asks for the next epoch before the last is done with.
        self._epoch = functools.lru_cache(maxsize=2)(self._compute_epoch)

    def shapes(self) -> list[BatchShape]:
        """The distinct shapes that batches have, shortest first."""
        used = np.unique(self._epoch(0).buckets)
        return list(dict.fromkeys(self._shapes[bucket] for bucket in used))

    def batch(self, index: int) -> PlannedBatch:
        """This process's share of batch `index`, 0 or more; epochs follow each other.

        Raises:
          IndexError: if `index` is negative.
        """
        if index < 0:
            raise IndexError(f"batch {index}, expected 0 or more")
        number, place = divmod(index, self.batches_per_epoch)
        epoch = self._epoch(number)
        index_here, count = self._process
        share = self.batch_size // count
        rows = epoch.rows[place].reshape(self.accumulate, self.batch_size)
        mine = rows[:, index_here * share : (index_here + 1) * share]
        return PlannedBatch(mine.reshape(-1), *self._shapes[epoch.buckets[place]])

    def one_pass(self) -> Iterator[PlannedBatch]:
        """The batches of the first epoch: every row once."""
        return map(self.batch, range(self.batches_per_epoch))

    def _compute_epoch(self, number: int) -> _Epoch:
        random = np.random.default_rng([self._seed, number])
        batches, buckets = [], []
        left = np.empty(0, np.int64)
        for bucket, members in enumerate(self._members):
            ordered = random.permutation(members) if self._shuffle else members
            rows = np.concatenate([left, ordered])
            full = len(rows) // self._rows_per_batch * self._rows_per_batch
            batches.append(rows[:full].reshape(-1, self._rows_per_batch))
            buckets += [bucket] * len(batches[-1])
            left = rows[full:]
        if left.size:
            missing = self._rows_per_batch - len(left)
            filled = np.pad(left, (0, missing), constant_values=FILLING)
            batches.append(filled[None])
            buckets.append(len(self._members) - 1)
        order = np.arange(len(buckets))
        if self._shuffle:
            order = random.permutation(order)
        return _Epoch(np.concatenate(batches)[order], np.array(buckets)[order])


def bucket_tops(
    length_buckets: Sequence[int], longest: int, maximum_length: int | None = None
) -> Int64[np.ndarray, "buckets"]:
    """The lengths that rows are padded to, the last of which holds the longest row.

    Raises:
      InputError: if the buckets do not increase from 1 or more, or the longest row is
        longer than `maximum_length`.
    """
    if maximum_length is not None and longest > maximum_length:
        raise InputError(
            f"the longest row has {longest} tokens, expected at most {maximum_length}; "
            "pass the same maximum_length to load_examples"
        )
    lengths = np.asarray(length_buckets, np.int64)
    if not lengths.size or lengths[0] < 1 or (np.diff(lengths) < 1).any():
        raise InputError(
            f"length_buckets are {list(length_buckets)}, expected increasing lengths "
            "from 1 or more"
        )
    top = round_up(longest)
    if maximum_length is not None:
        top = min(top, maximum_length)
    return np.append(lengths[lengths < top], top)


def round_up(number: int) -> int:
    """The next multiple of 8."""
    return -(-number // MULTIPLE) * MULTIPLE


def _highest_by_bucket(
    tables: Int64[np.ndarray, "k E"], members: list[np.ndarray], rows_per_batch: int
) -> list[list[int]]:
    """The highest entries of rows that may fall into each bucket's batches.

    Those are the bucket's own rows and what the ones below leave. What is left comes
    first in the next bucket, so rows go up by two only past a bucket without a batch.
    """
    highest = np.zeros((len(members), len(tables)), np.int64)
    left, left_highest = 0, np.zeros(len(tables), np.int64)
    for bucket, rows in enumerate(members):
        own = tables[:, rows].max(axis=1)
        highest[bucket] = np.maximum(own, left_highest)
        no_batch = left + len(rows) < rows_per_batch
        left = (left + len(rows)) % rows_per_batch
        if no_batch:
            left_highest = highest[bucket]
        else:
            left_highest = own if left else np.zeros_like(own)
    return highest.tolist()


def _check_arguments(
    batch_size: int, accumulate: int, process_index: int, process_count: int
) -> None:
    if batch_size < 1 or accumulate < 1:
        raise InputError(
            f"batch_size is {batch_size} and accumulate {accumulate}, expected at "
            "least 1"
        )
    if not 0 <= process_index < process_count:
        raise InputError(
            f"process {process_index} of {process_count}: expected an index from 0 to "
            "one less than the count"
        )
    if batch_size % process_count:
        raise InputError(
            f"batch_size is {batch_size}, expected a multiple of {process_count}, the "
            "number of processes that share each batch"
        )


def _check_lengths(input_lengths: Integer[np.ndarray, "E"]) -> None:
    if not input_lengths.size:
        raise InputError("there is no row to plan batches of, expected at least one")
    if input_lengths.min() < 1:
        raise InputError(
            f"row {int(np.argmin(input_lengths))} has {input_lengths.min()} inputs, "
            "expected at least 1"
        )
