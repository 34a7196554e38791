"""Measure a run's throughput, and the time it waits for data."""

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from prompt_tuning.core.batch import Batch
from prompt_tuning.data.batching.batches import real_token_share

Item = TypeVar("Item")


class Meter:
    """Measures training tokens per second between two lines of the log."""

    def __init__(self):
        self._start_over()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Pauses the clock while entered."""
        start = time.monotonic()
        yield
        self._started += time.monotonic() - start

    def waiting(self, batches: Iterable[Item]) -> Iterator[Item]:
        """Yields the same batches, and measures the time spent waiting for each."""
        iterator = iter(batches)
        while True:
            start = time.monotonic()
            batch = next(iterator, None)
            self._waited += time.monotonic() - start
            if batch is None:
                return
            yield batch

    def count(self, batch: Batch) -> None:
        """Counts the tokens of a training batch."""
        self._real += real_token_share(batch) * batch.tokens.size
        self._all += batch.tokens.size

    def read(self) -> dict[str, float]:
        """Returns the measurements since the last call, and starts over.

        Returns:
          `tokens_per_second` (inputs, without padding), `padding_share` (of the
          inputs), and `data_wait_share`, the share of time spent waiting for the next
          batch.
        """
        seconds = max(time.monotonic() - self._started, 1e-9)
        measured = {
            "tokens_per_second": self._real / seconds,
            "padding_share": 1 - self._real / max(self._all, 1),
            "data_wait_share": self._waited / seconds,
        }
        self._start_over()
        return measured

    def _start_over(self) -> None:
        self._started = time.monotonic()
        self._real, self._all, self._waited = 0.0, 0, 0.0
