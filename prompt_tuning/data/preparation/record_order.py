"""Orders records and draws held-out ones, from a seed in constant memory.

Each element of a permutation is computed separately. A balanced Feistel network (Luby
and Rackoff 1988) permutes a range with a power of four elements; it is applied again
while a value is outside the permutation (cycle walking, Black and Rogaway 2002).
"""

import dataclasses

import numpy as np
from jaxtyping import Int64, UInt64

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.preparation.preparation_settings import Splits

TRAIN, DEV, TEST = 0, 1, 2
SPLIT_NAMES = ("train", "dev", "test")
ROUNDS = 6
BLOCK = 1 << 16


def _mix(values: UInt64[np.ndarray, "n"], key: int) -> UInt64[np.ndarray, "n"]:
    """Mixes all bits of each value and the key (splitmix64's finalizer)."""
    with np.errstate(over="ignore"):
        values = (values + np.uint64(key)) * np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Permutation:
    """A pseudorandom permutation of 0 to `size - 1`, with `size` at least 1."""

    def __init__(self, size: int, seed: int):
        self.size = size
        # Bits of each half of the network's input.
        self._half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
        keys = np.random.SeedSequence([seed, size]).generate_state(ROUNDS, np.uint64)
        self._keys = [int(key) for key in keys]

    def forward(self, positions: Int64[np.ndarray, "n"]) -> Int64[np.ndarray, "n"]:
        """Returns the values at positions."""
        return self._walk(positions, self._encipher)

    def backward(self, values: Int64[np.ndarray, "n"]) -> Int64[np.ndarray, "n"]:
        """Returns the positions of values."""
        return self._walk(values, self._decipher)

    def _walk(self, start, step) -> Int64[np.ndarray, "n"]:
        values = step(start.astype(np.uint64))
        outside = np.flatnonzero(values >= self.size)
        while outside.size:
            values[outside] = step(values[outside])
            outside = outside[values[outside] >= self.size]
        return values.astype(np.int64)

    def _encipher(self, values: UInt64[np.ndarray, "n"]) -> UInt64[np.ndarray, "n"]:
        left, right = self._halves(values)
        for key in self._keys:
            left, right = right, left ^ (_mix(right, key) & self._mask)
        return (left << np.uint64(self._half)) | right

    def _decipher(self, values: UInt64[np.ndarray, "n"]) -> UInt64[np.ndarray, "n"]:
        left, right = self._halves(values)
        for key in reversed(self._keys):
            left, right = right ^ (_mix(left, key) & self._mask), left
        return (left << np.uint64(self._half)) | right

    @property
    def _mask(self) -> np.uint64:
        return np.uint64((1 << self._half) - 1)

    def _halves(self, values: UInt64[np.ndarray, "n"]):
        return values >> np.uint64(self._half), values & self._mask


@dataclasses.dataclass(frozen=True)
class RecordOrder:
    """The order of the records by split.

    The permutation starts with the test split, followed by the development split and
    the training split. With `shuffle`, a split follows the permutation, or else the
    order of the files. The held-out records are the same either way.
    """

    records: int
    dev: int
    test: int
    shuffle: bool
    seed: int

    def span(self, split: int) -> tuple[int, int]:
        """Returns the start and end of a split in the permutation."""
        held_out = self.test + self.dev
        return ((held_out, self.records), (self.test, held_out), (0, self.test))[split]

    def positions(self, split: int) -> int:
        """Number of positions that `block` covers; some may have no record."""
        if self.shuffle:
            start, stop = self.span(split)
            return stop - start
        return self.records if self.span(split)[0] < self.span(split)[1] else 0

    def block(self, split: int, first: int) -> tuple[Int64[np.ndarray, "n"], int]:
        """Returns the records of up to `BLOCK` positions, and the next position."""
        stop = min(first + BLOCK, self.positions(split))
        positions = np.arange(first, stop, dtype=np.int64)
        start, end = self.span(split)
        permutation = Permutation(self.records, self.seed)
        if self.shuffle:
            return permutation.forward(positions + start), stop
        if self.records == end - start:
            return positions, stop
        # In file order a record's position is its number; its rank in the permutation
        # decides whether it belongs to the split.
        ranks = permutation.backward(positions)
        return positions[(start <= ranks) & (ranks < end)], stop


def record_order(splits: Splits, records: int) -> RecordOrder:
    """Returns the order of `records` records for the given splits.

    Neither the training split nor a requested split may be empty.
    """
    counts = {"dev": splits.dev.resolve(records), "test": splits.test.resolve(records)}
    for name, share in (("dev", splits.dev), ("test", splits.test)):
        if (share.ratio or share.count) and not counts[name]:
            raise InputError(
                f"{name} is {share.ratio} of {records} records, which rounds to none; "
                "use a count or a larger ratio"
            )
    if sum(counts.values()) >= records:
        raise InputError(
            f"dev takes {counts['dev']} and test {counts['test']} of {records} "
            "records, expected at least one to be left to train on"
        )
    return RecordOrder(
        records, counts["dev"], counts["test"], splits.shuffle, splits.seed
    )
