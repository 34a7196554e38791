"""Which record comes when, and which are held out, from a seed and in no memory.

A permutation of any number of records is computed record by record: a balanced Feistel
network (Luby and Rackoff 1988) over the next power of four, followed again from each
value that falls outside (cycle walking, Black and Rogaway 2002).
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


def _mixed(values: UInt64[np.ndarray, "n"], key: int) -> UInt64[np.ndarray, "n"]:
    """Bits that depend on all bits of a value and a key (splitmix64's finaliser)."""
    with np.errstate(over="ignore"):
        values = (values + np.uint64(key)) * np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Permutation:
    """A permutation of 0 to `size - 1` that a seed names.

    Args:
      size: how many there are, at least 1.
      seed: names the permutation.
    """

    def __init__(self, size: int, seed: int):
        self.size = size
        self._half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
        keys = np.random.SeedSequence([seed, size]).generate_state(ROUNDS, np.uint64)
        self._keys = [int(key) for key in keys]

    def forward(self, places: Int64[np.ndarray, "n"]) -> Int64[np.ndarray, "n"]:
        """What stands at some places."""
        return self._walk(places, self._encipher)

    def backward(self, values: Int64[np.ndarray, "n"]) -> Int64[np.ndarray, "n"]:
        """The places at which some values stand."""
        return self._walk(values, self._decipher)

    def _walk(self, start, step) -> Int64[np.ndarray, "n"]:
        found = step(start.astype(np.uint64))
        outside = np.flatnonzero(found >= self.size)
        while outside.size:
            found[outside] = step(found[outside])
            outside = outside[found[outside] >= self.size]
        return found.astype(np.int64)

    def _encipher(self, values: UInt64[np.ndarray, "n"]) -> UInt64[np.ndarray, "n"]:
        left, right = self._halves(values)
        for key in self._keys:
            left, right = right, left ^ (_mixed(right, key) & self._mask)
        return (left << np.uint64(self._half)) | right

    def _decipher(self, values: UInt64[np.ndarray, "n"]) -> UInt64[np.ndarray, "n"]:
        left, right = self._halves(values)
        for key in reversed(self._keys):
            left, right = right ^ (_mixed(left, key) & self._mask), left
        return (left << np.uint64(self._half)) | right

    @property
    def _mask(self) -> np.uint64:
        return np.uint64((1 << self._half) - 1)

    def _halves(self, values: UInt64[np.ndarray, "n"]):
        return values >> np.uint64(self._half), values & self._mask


@dataclasses.dataclass(frozen=True)
class RecordOrder:
    """The order of the records of each split.

    The permutation's first records are the test split, then come the development split
    and the training split. Shuffled, the records of a split come in the permutation's
    order; otherwise in their own. The held-out records are the same either way.

    Attributes:
      records: how many there are.
      dev: how many are held out for development.
      test: how many for the test.
      shuffle: whether they are shuffled.
      seed: names the permutation.
    """

    records: int
    dev: int
    test: int
    shuffle: bool
    seed: int

    def span(self, split: int) -> tuple[int, int]:
        """From where to where a split lies in the permutation."""
        held = self.test + self.dev
        return ((held, self.records), (self.test, held), (0, self.test))[split]

    def positions(self, split: int) -> int:
        """How many positions `block` is to be asked for; some may hold no record."""
        if self.shuffle:
            start, stop = self.span(split)
            return stop - start
        return self.records if self.span(split)[0] < self.span(split)[1] else 0

    def block(
        self, split: int, first: int
    ) -> tuple[Int64[np.ndarray, "n"], Int64[np.ndarray, "n"], int]:
        """The records of up to `BLOCK` positions, those positions, and the next."""
        stop = min(first + BLOCK, self.positions(split))
        positions = np.arange(first, stop, dtype=np.int64)
        start, end = self.span(split)
        permutation = Permutation(self.records, self.seed)
        if self.shuffle:
            return permutation.forward(positions + start), positions, stop
        if self.records == end - start:
            return positions, positions, stop
        ranks = permutation.backward(positions)
        kept = positions[(start <= ranks) & (ranks < end)]
        return kept, kept, stop


def record_order(splits: Splits, records: int) -> RecordOrder:
    """Turns ratios and counts into numbers of records.

    Raises:
      InputError: if nothing is left to train on, or a part that was asked for is empty.
    """
    counts = {"dev": splits.dev.of(records), "test": splits.test.of(records)}
    for name, share in (("dev", splits.dev), ("test", splits.test)):
        if (share.ratio or share.count) and not counts[name]:
            raise InputError(
                f"{name} is {share.ratio} of {records} records, which rounds to none; "
                "ask for a count or a larger ratio"
            )
    if sum(counts.values()) >= records:
        raise InputError(
            f"dev takes {counts['dev']} and test {counts['test']} of {records} "
            "records, expected at least one to be left to train on"
        )
    return RecordOrder(
        records, counts["dev"], counts["test"], splits.shuffle, splits.seed
    )
