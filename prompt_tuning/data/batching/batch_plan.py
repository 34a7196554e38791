"""Which examples make which batch: a plan that every process computes alike.

The plan follows from the length table, the seed and the index of a batch alone: no
process tells another anything, and a run that resumes goes on at its index.
"""

import abc
import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, Integer

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.batching.buckets import bucket_of, choose_tops, holds_all

FILLING = -1
"""Stands for no example, where the last batch of an epoch has too few."""

TOKEN_COST, TARGET_COST = 4, 1
"""What a token and a target that carries weight cost in a decoder-only model, for the
choice of buckets: the head takes between half (GPT-2 small) and a fifteenth (Llama 8B)
of the time of the blocks."""


@dataclasses.dataclass(frozen=True)
class PlannedBatch:
    """The examples of one batch, and the shape they go into.

    Attributes:
      rows: the example of each row, `[A * B]` (`A` micro-batches of `B` rows, one
        after the other); `FILLING` (-1) where there is none. In a packed batch
        `[A * B, n]`: each row's examples, which stand one after the other without a
        gap; `n` is the same for every batch of a plan.
      input_length: `T`.
      target_length: `U`.
      positions: `m`, room for the targets of a row that carry weight.
      same_tokens: whether inputs and targets are the same row (decoder-only).
    """

    rows: Int64[np.ndarray, "R"] | Int64[np.ndarray, "R n"]
    input_length: int
    target_length: int
    positions: int
    same_tokens: bool = True


class BatchShape(NamedTuple):
    """What the arrays of a batch are padded to: `T`, `U` and `m`."""

    input_length: int
    target_length: int
    positions: int


class Epoch(NamedTuple):
    """All batches of one epoch, in order: the rows of each, and their shape."""

    rows: list[np.ndarray]
    shapes: list[BatchShape]

    def reordered(self, order: Int64[np.ndarray, "n"]) -> "Epoch":
        """The same batches in another order."""
        return Epoch([self.rows[i] for i in order], [self.shapes[i] for i in order])


@dataclasses.dataclass(frozen=True)
class Sharing:
    """How a batch is cut: in micro-batches, and each of these among devices.

    Attributes:
      accumulate: `A`, micro-batches of a batch, all of one shape.
      row_parts: among how many devices the rows of one are divided. A micro-batch of
        another number of rows gets `FILLING` behind them, so that what is planned is
        the same on any number of devices.

    Raises:
      InputError: if there is no micro-batch.
    """

    accumulate: int = 1
    row_parts: int = 1

    def __post_init__(self):
        if self.accumulate < 1:
            raise InputError(f"accumulate is {self.accumulate}, expected at least 1")

    def filled(self, rows: np.ndarray) -> np.ndarray:
        """A batch's rows, each micro-batch of so many that they can be divided."""
        cut = rows.reshape(self.accumulate, -1, *rows.shape[1:])
        missing = [(0, 0)] * cut.ndim
        missing[1] = (0, -cut.shape[1] % self.row_parts)
        cut = np.pad(cut, missing, constant_values=FILLING)
        return cut.reshape(-1, *rows.shape[1:])


@dataclasses.dataclass(frozen=True)
class BatchSize:
    """How many rows a micro-batch has.

    Attributes:
      rows: of every micro-batch; None where `tokens` says it.
      tokens: as many rows as have so many tokens, padding included; None if `rows`.

    Raises:
      InputError: unless one of the two is given, and is 1 or more.
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
        """Most rows of a micro-batch whose rows have so many tokens.

        Raises:
          InputError: if one row has more.
        """
        if self.tokens is None:
            assert self.rows is not None
            return self.rows
        if self.tokens < row_tokens:
            raise InputError(
                f"batch_tokens is {self.tokens}, but the longest example alone has "
                f"{row_tokens} tokens: expected at least so many, or a maximum length"
            )
        return self.tokens // row_tokens


class BatchPlan(abc.ABC):
    """Batches in an order in which every example comes once in each epoch.

    Attributes:
      examples: how many there are.
      accumulate: micro-batches of a batch, all of one shape.
      same_tokens: whether inputs and targets are the same row (decoder-only).
    """

    def __init__(
        self,
        examples: int,
        seed: int,
        shuffle: bool,
        sharing: Sharing,
        *,
        same_tokens: bool,
    ):
        self.examples = examples
        self.accumulate = sharing.accumulate
        self.same_tokens = same_tokens
        self._seed, self._shuffle, self._sharing = seed, shuffle, sharing
        # A reader that runs ahead asks for the next epoch before the last is done with.
        self._epoch = functools.lru_cache(maxsize=2)(self._seeded_epoch)

    @abc.abstractmethod
    def _compute_epoch(self, random: np.random.Generator) -> Epoch:
        """The batches of an epoch; their number does not depend on `random`.

        Shuffled, they are put into a random order afterwards.
        """

    @functools.cached_property
    def batches_per_epoch(self) -> int:
        """Batches that hold every example once."""
        return len(self._epoch(0).rows)

    def shapes(self) -> list[BatchShape]:
        """The distinct shapes that batches have, shortest first."""
        return sorted(set(self._epoch(0).shapes))

    def batch(self, index: int) -> PlannedBatch:
        """Batch `index`, 0 or more; epochs follow each other.

        Raises:
          IndexError: if `index` is negative.
        """
        if index < 0:
            raise IndexError(f"batch {index}, expected 0 or more")
        number, place = divmod(index, self.batches_per_epoch)
        epoch = self._epoch(number)
        return PlannedBatch(
            self._sharing.filled(epoch.rows[place]),
            *epoch.shapes[place],
            same_tokens=self.same_tokens,
        )

    def one_pass(self) -> Iterator[PlannedBatch]:
        """The batches of the first epoch: every example once."""
        return map(self.batch, range(self.batches_per_epoch))

    def examples_before(self, index: int) -> int:
        """How many examples have been met before batch `index`."""
        number, place = divmod(index, self.batches_per_epoch)
        met = self._epoch(number).rows[:place]
        return number * self.examples + sum(int((rows >= 0).sum()) for rows in met)

    def _seeded_epoch(self, number: int) -> Epoch:
        random = np.random.default_rng([self._seed, number])
        epoch = self._compute_epoch(random)
        if not self._shuffle:
            return epoch
        return epoch.reordered(random.permutation(len(epoch.rows)))


class _Bucket(NamedTuple):
    """Examples of like length.

    Attributes:
      members: their numbers.
      shape: what they are padded to.
      batch_rows: rows of a batch, over all micro-batches.
      above: the bucket that gets those that do not fill a batch; None for the last.
    """

    members: Int64[np.ndarray, "_"]
    shape: BatchShape
    batch_rows: int
    above: int | None


class BucketPlan(BatchPlan):
    """Batches of examples of like length, one in each row.

    Buckets are pairs of lengths, chosen from the table; see `buckets.choose_tops`. In
    an encoder-decoder they are of the input and of the target, which are so padded
    apart; in a decoder-only model of the row, and of the targets in it that carry
    weight. There are at most `buckets` of them, and no more than batches.

    What does not fill a batch goes up into the cheapest bucket that both its lengths
    fit in, so every batch is full but for the last of the highest, which is filled with
    `FILLING`. A bucket that is too thin for a batch is thereby merged into the one
    above, and a step compiles at most once for each bucket.
    """

    def __init__(
        self,
        input_lengths: Integer[np.ndarray, "E"],
        target_lengths: Integer[np.ndarray, "E"],
        weight_counts: Integer[np.ndarray, "E"],
        *,
        batch_size: int | None = None,
        batch_tokens: int | None = None,
        seed: int,
        shuffle: bool = True,
        same_tokens: bool,
        buckets: int = 8,
        rows_per_example: int = 1,
        maximum_length: int | None = None,
        accumulate: int = 1,
        row_parts: int = 1,
    ):
        """Sorts the examples into buckets.

        Args:
          input_lengths: of each example; see `Examples`.
          target_lengths: of each example.
          weight_counts: targets of each example whose weight is not zero.
          batch_size: rows of a micro-batch.
          batch_tokens: in its place, most tokens of one, padding included (inputs and
            in an encoder-decoder targets): short examples come in larger batches, and
            in smaller ones where there are too few to fill one.
          seed: of the order.
          shuffle: whether each epoch has an order of its own. Without it batches may
            be smaller than `batch_size`, so that little is filled.
          same_tokens: whether inputs and targets are the same row (decoder-only), so
            that both are padded alike.
          buckets: most shapes of batches.
          rows_per_example: rows that an example becomes, one for each of its classes;
            `batch_size` is of examples then, `batch_tokens` of all their rows.
          maximum_length: no row is padded beyond it: the model's positions minus the
            prompt's vectors.
          accumulate: `A`, micro-batches of a batch.
          row_parts: among how many devices the rows of one are divided.

        Raises:
          InputError: if there is no example, or an argument is out of range.
        """
        check_lengths(input_lengths, maximum_length)
        if buckets < 1:
            raise InputError(f"buckets is {buckets}, expected at least 1")
        sharing = Sharing(accumulate, row_parts)
        super().__init__(
            len(input_lengths), seed, shuffle, sharing, same_tokens=same_tokens
        )
        self._size = BatchSize(batch_size, batch_tokens)
        self._rows_per_example = rows_per_example
        second = weight_counts if same_tokens else target_lengths
        lengths = np.stack([input_lengths, second], axis=1)
        rows = self._limit(holds_all(lengths, maximum_length)) * accumulate
        tops = choose_tops(
            lengths,
            count=min(buckets, -(-len(lengths) // rows)),
            costs=(TOKEN_COST, TARGET_COST) if same_tokens else (1, 1),
            maximum_length=maximum_length,
        )
        self._buckets = self._make_buckets(tops, bucket_of(lengths, tops))

    def _limit(self, top: list[int]) -> int:
        """Most rows of a micro-batch of a bucket."""
        tokens = self._rows_per_example * (top[0] if self.same_tokens else sum(top))
        return self._size.limit(tokens)

    def _make_buckets(
        self, tops: Int64[np.ndarray, "b 2"], bucket_of_example: Int64[np.ndarray, "E"]
    ) -> list[_Bucket]:
        found, received = [], np.zeros(len(tops), np.int64)
        for number, top in enumerate(tops.tolist()):
            members = np.flatnonzero(bucket_of_example == number)
            above = _first_that_holds(tops, number)
            count = int(received[number]) + len(members)
            rows = self.accumulate * self._rows(top, count)
            if above is not None:
                received[above] += count % rows
            found.append(_Bucket(members, self._shape(top), rows, above))
        return found

    def _rows(self, top: list[int], count: int) -> int:
        """Rows of a micro-batch of a bucket that gets `count` examples in an epoch.

        To train on a fixed number of rows, that number; else no more than there are.
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
        for bucket, left in zip(self._buckets, waiting, strict=True):
            members = bucket.members
            own = random.permutation(members) if self._shuffle else members
            rows = np.concatenate([*left, own])
            if bucket.above is None:
                missing = -len(rows) % bucket.batch_rows
                rows = np.pad(rows, (0, missing), constant_values=FILLING)
            full = len(rows) // bucket.batch_rows * bucket.batch_rows
            cut = rows[:full].reshape(-1, bucket.batch_rows)
            batches += list(cut)
            shapes += [bucket.shape] * len(cut)
            if bucket.above is not None:
                waiting[bucket.above].append(rows[full:])
        return Epoch(batches, shapes)


def _first_that_holds(tops: Int64[np.ndarray, "b 2"], number: int) -> int | None:
    """The next of `tops` that bucket `number` fits in; None for the last."""
    holds = np.flatnonzero((tops[number] <= tops[number + 1 :]).all(axis=1))
    return number + 1 + int(holds[0]) if len(holds) else None


def check_lengths(
    input_lengths: Integer[np.ndarray, "E"], maximum_length: int | None
) -> None:
    """Refuses a length table that there is no plan of.

    Raises:
      InputError: if there is no example, or one is empty or too long.
    """
    if not input_lengths.size:
        raise InputError("there is no row to plan batches of, expected at least one")
    if input_lengths.min() < 1:
        raise InputError(
            f"row {int(np.argmin(input_lengths))} has {input_lengths.min()} inputs, "
            "expected at least 1"
        )
    longest = int(input_lengths.max())
    if maximum_length is not None and longest > maximum_length:
        raise InputError(
            f"the longest row has {longest} tokens, expected at most {maximum_length}; "
            "pass the same maximum_length to load_examples"
        )
