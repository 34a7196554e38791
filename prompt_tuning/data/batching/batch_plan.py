"""Plans the examples of each batch.

A plan depends only on the examples' lengths, the seed and the index of a batch, so
every process computes the same one without communicating, and a resumed run continues
at its index.
"""

import abc
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64, Integer

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.batching.buckets import (
    MAXIMUM_BUCKETS,
    SAVED_BATCHES,
    SAVED_BATCHES_IN_ORDER,
    assign_buckets,
    choose_tops,
    largest_pair,
)

FILLING = -1
"""Number of no example, which fills the last batch of an epoch."""

TOKEN_COST, TARGET_COST = 4, 1
"""Relative costs of a token and of a learned target in a decoder-only model, for the
choice of buckets: the output head takes between half (GPT-2 small) and a fifteenth
(Llama 8B) of the time of the blocks."""


@dataclasses.dataclass(frozen=True)
class PlannedBatch:
    """The examples of one batch, and the shape that they are padded to.

    Attributes:
      rows: number of the example in a row, `[A * B]` for `A` micro-batches of `B` rows,
        or `FILLING` (-1) for an empty row. In a packed batch, `[A * B, n]`: the
        examples that a row joins without gaps.
      input_length: `T`, length of the inputs.
      target_length: `U`, length of the targets.
      positions: `m`, maximum number of learned targets of a row.
      same_tokens: whether the inputs are also the targets (decoder-only).
    """

    rows: Int64[np.ndarray, "R"] | Int64[np.ndarray, "R n"]
    input_length: int
    target_length: int
    positions: int
    same_tokens: bool = True


class BatchShape(NamedTuple):
    """The lengths that the arrays of a batch are padded to: `T`, `U` and `m`."""

    input_length: int
    target_length: int
    positions: int


class Epoch(NamedTuple):
    """The rows and the shape of every batch of one epoch, in order."""

    rows: list[np.ndarray]
    shapes: list[BatchShape]

    def reorder(self, order: Int64[np.ndarray, "n"]) -> "Epoch":
        """Returns the same batches in another order."""
        return Epoch([self.rows[i] for i in order], [self.shapes[i] for i in order])


@dataclasses.dataclass(frozen=True)
class Sharing:
    """How a batch is divided into `accumulate` micro-batches, and those among devices.

    The rows of a micro-batch are divided among `row_parts` devices. Where they do not
    divide evenly, the micro-batch is padded with `FILLING`, so the plan does not depend
    on the number of devices.
    """

    accumulate: int = 1
    row_parts: int = 1

    def __post_init__(self):
        if self.accumulate < 1:
            raise InputError(f"accumulate is {self.accumulate}, expected at least 1")

    def pad_rows(self, rows: np.ndarray) -> np.ndarray:
        """Pads every micro-batch so that its rows divide among the devices."""
        micro_batches = rows.reshape(self.accumulate, -1, *rows.shape[1:])
        padding = [(0, 0)] * micro_batches.ndim
        padding[1] = (0, -micro_batches.shape[1] % self.row_parts)
        padded = np.pad(micro_batches, padding, constant_values=FILLING)
        return padded.reshape(-1, *rows.shape[1:])


@dataclasses.dataclass(frozen=True)
class BatchSize:
    """The rows of a micro-batch: a fixed number, or as many as have `tokens` tokens.

    Padding counts as tokens. InputError unless exactly one of the two is given.
    """

    rows: int | None = None
    tokens: int | None = None

    def __post_init__(self):
        if (self.rows is None) == (self.tokens is None):
            raise InputError("expected either batch_size or batch_tokens")
        for name, size in (("batch_size", self.rows), ("batch_tokens", self.tokens)):
            if size is not None and size < 1:
                raise InputError(f"{name} is {size}, expected at least 1")

    def limit(self, row_tokens: int) -> int:
        """Returns the maximum number of rows of `row_tokens` tokens each."""
        if self.tokens is None:
            assert self.rows is not None
            return self.rows
        if self.tokens < row_tokens:
            raise InputError(
                f"batch_tokens is {self.tokens}, but the longest example alone has "
                f"{row_tokens} tokens: expected at least as many, or a maximum length"
            )
        return self.tokens // row_tokens


class BatchPlan(abc.ABC):
    """Batches in an order with each example once in every epoch."""

    def __init__(
        self,
        input_lengths: Integer[np.ndarray, "E"],
        *,
        same_tokens: bool,
        batch_size: int | None = None,
        batch_tokens: int | None = None,
        seed: int,
        shuffle: bool = True,
        maximum_length: int | None = None,
        accumulate: int = 1,
        row_parts: int = 1,
    ):
        """Checks the settings of all kinds of plans.

        Args:
          input_lengths: number of inputs by example; see `Examples`.
          same_tokens: whether inputs are also targets, padded to one length.
          batch_size: rows of a micro-batch.
          batch_tokens: maximum tokens of a micro-batch, padding included, in place of
            `batch_size`: batches of short examples are larger.
          seed: seed of the order.
          shuffle: whether each epoch has its own order. If not, a batch is never larger
            than its examples need, which leaves fewer empty rows.
          maximum_length: maximum length to pad to: the model's positions minus the
            prompt vectors.
          accumulate: see `Sharing`.
          row_parts: see `Sharing`.
        """
        check_lengths(input_lengths, maximum_length)
        self.examples, self.same_tokens = len(input_lengths), same_tokens
        self.accumulate, self._maximum_length = accumulate, maximum_length
        self._sharing = Sharing(accumulate, row_parts)
        self._size = BatchSize(batch_size, batch_tokens)
        self._seed, self._shuffle = seed, shuffle
        # A prefetching reader needs the next epoch before the current one is finished.
        self._epoch = functools.lru_cache(maxsize=2)(self._seeded_epoch)

    @abc.abstractmethod
    def _compute_epoch(self, random: np.random.Generator) -> Epoch:
        """Computes the batches of an epoch; their number is the same for any `random`.

        A plan that shuffles randomizes their order afterwards.
        """

    @functools.cached_property
    def batches_per_epoch(self) -> int:
        """Number of batches that contain every example once."""
        return len(self._epoch(0).rows)

    def shapes(self) -> list[BatchShape]:
        """Returns the distinct shapes of the batches, shortest first."""
        return sorted(set(self._epoch(0).shapes))

    def batch(self, index: int) -> PlannedBatch:
        """Returns batch `index`, which counts on from one epoch to the next."""
        if index < 0:
            raise IndexError(f"batch {index}, expected 0 or more")
        number, position = divmod(index, self.batches_per_epoch)
        epoch = self._epoch(number)
        return PlannedBatch(
            self._sharing.pad_rows(epoch.rows[position]),
            *epoch.shapes[position],
            same_tokens=self.same_tokens,
        )

    def one_pass(self) -> Iterator[PlannedBatch]:
        """Yields the batches of the first epoch: every example once."""
        return map(self.batch, range(self.batches_per_epoch))

    def examples_before(self, index: int) -> int:
        """Returns the number of examples that precede batch `index`."""
        number, position = divmod(index, self.batches_per_epoch)
        batches = self._epoch(number).rows[:position]
        return number * self.examples + sum(int((rows >= 0).sum()) for rows in batches)

    def _seeded_epoch(self, number: int) -> Epoch:
        random = np.random.default_rng([self._seed, number])
        epoch = self._compute_epoch(random)
        if not self._shuffle:
            return epoch
        return epoch.reorder(random.permutation(len(epoch.rows)))


class _Bucket(NamedTuple):
    """Examples of similar length, by number, and the shape to pad them to.

    `batch_rows` are the rows of all micro-batches together. Examples that do not fill a
    batch go to the bucket `above`; the last one has none.
    """

    members: Int64[np.ndarray, "_"]
    shape: BatchShape
    batch_rows: int
    above: int | None


class BucketPlan(BatchPlan):
    """Batches of examples of similar length, one example per row.

    A bucket is a pair of lengths, chosen to suit the examples (`buckets.choose_tops`):
    the number of inputs and of targets in an encoder-decoder, which pads them
    separately; the number of tokens and of learned targets in a decoder-only model.

    Examples that do not fill a batch move to the cheapest bucket where both their
    lengths fit, so every batch is full except the last one of the highest bucket, which
    is padded with `FILLING`. A step compiles at most once per bucket, and there are at
    most `buckets` of them.
    """

    def __init__(
        self,
        input_lengths: Integer[np.ndarray, "E"],
        target_lengths: Integer[np.ndarray, "E"],
        weight_counts: Integer[np.ndarray, "E"],
        *,
        buckets: int | None = None,
        rows_per_example: int = 1,
        shares_prompt: bool = False,
        **settings: Any,
    ):
        """Sorts the examples into buckets.

        Args:
          input_lengths: number of inputs by example; see `Examples`.
          target_lengths: number of targets by example.
          weight_counts: number of learned targets by example.
          buckets: maximum number of shapes; None to add one only if it saves the time
            of `SAVED_BATCHES`.
          rows_per_example: rows of an example; `batch_size` then counts examples, and
            `batch_tokens` all their rows.
          shares_prompt: whether these rows have their inputs in common.
          settings: see `BatchPlan`.
        """
        super().__init__(input_lengths, **settings)
        if buckets is not None and buckets < 1:
            raise InputError(f"buckets is {buckets}, expected at least 1")
        self._rows_per_example, self._shares_prompt = rows_per_example, shares_prompt
        maximum_length = self._maximum_length
        second = weight_counts if self.same_tokens else target_lengths
        lengths = np.stack([input_lengths, second], axis=1)
        rows = self._limit(largest_pair(lengths, maximum_length)) * self.accumulate
        saved_batches = SAVED_BATCHES if self._shuffle else SAVED_BATCHES_IN_ORDER
        tops = choose_tops(
            lengths,
            count=min(buckets or MAXIMUM_BUCKETS, -(-len(lengths) // rows)),
            costs=(TOKEN_COST, TARGET_COST) if self.same_tokens else (1, 1),
            maximum_length=maximum_length,
            saved_examples=saved_batches * rows if buckets is None else 0,
        )
        self._buckets = self._make_buckets(tops, assign_buckets(lengths, tops))

    def _limit(self, top: list[int]) -> int:
        rows, targets = self._rows_per_example, 0 if self.same_tokens else top[1]
        given = 1 if self._shares_prompt else rows
        return self._size.limit(given * top[0] + rows * targets)

    def _make_buckets(
        self, tops: Int64[np.ndarray, "b 2"], bucket_of_example: Int64[np.ndarray, "E"]
    ) -> list[_Bucket]:
        # Examples that each bucket receives from lower ones in every epoch.
        buckets, received = [], np.zeros(len(tops), np.int64)
        for number, top in enumerate(tops.tolist()):
            members = np.flatnonzero(bucket_of_example == number)
            above = _next_fitting(tops, number)
            count = int(received[number]) + len(members)
            rows = self.accumulate * self._rows(top, count)
            if above is not None:
                received[above] += count % rows
            buckets.append(_Bucket(members, self._shape(top), rows, above))
        return buckets

    def _rows(self, top: list[int], count: int) -> int:
        """Returns the rows of a micro-batch for a bucket with `count` examples.

        Training with a fixed number of rows uses it; otherwise a batch fits into its
        bucket.
        """
        limit = self._limit(top)
        if self._shuffle and self._size.tokens is None:
            return limit
        return min(limit, max(count // self.accumulate, 1))

    def _shape(self, top: list[int]) -> BatchShape:
        inputs, second = top
        if self.same_tokens:
            return BatchShape(inputs, inputs, min(second, inputs))
        return BatchShape(inputs, second, second)

    def _compute_epoch(self, random: np.random.Generator) -> Epoch:
        batches, shapes = [], []
        waiting: list[list[np.ndarray]] = [[] for _ in self._buckets]
        for bucket, received in zip(self._buckets, waiting, strict=True):
            members = bucket.members
            order = random.permutation(members) if self._shuffle else members
            rows = np.concatenate([*received, order])
            if bucket.above is None:
                missing = -len(rows) % bucket.batch_rows
                rows = np.pad(rows, (0, missing), constant_values=FILLING)
            full = len(rows) // bucket.batch_rows * bucket.batch_rows
            new_batches = rows[:full].reshape(-1, bucket.batch_rows)
            batches += list(new_batches)
            shapes += [bucket.shape] * len(new_batches)
            if bucket.above is not None:
                waiting[bucket.above].append(rows[full:])
        return Epoch(batches, shapes)


def _next_fitting(tops: Int64[np.ndarray, "b 2"], number: int) -> int | None:
    fits = np.flatnonzero((tops[number] <= tops[number + 1 :]).all(axis=1))
    return number + 1 + int(fits[0]) if len(fits) else None


def check_lengths(
    input_lengths: Integer[np.ndarray, "E"], maximum_length: int | None
) -> None:
    """Refuses an empty table, and examples without inputs or with too many."""
    if not input_lengths.size:
        raise InputError("there are no rows to plan batches of, expected at least one")
    if input_lengths.min() < 1:
        raise InputError(
            f"row {int(np.argmin(input_lengths))} has {input_lengths.min()} inputs, "
            "expected at least 1"
        )
    longest = int(input_lengths.max())
    if maximum_length is not None and longest > maximum_length:
        raise InputError(
            f"the longest row has {longest} tokens, expected at most {maximum_length}; "
            "load the examples with the same maximum_length"
        )
