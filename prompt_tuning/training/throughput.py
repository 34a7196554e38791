"""How fast a run goes, and what it waits for."""

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from prompt_tuning.core.batch import Batch
from prompt_tuning.data.batching.batches import real_token_share

Item = TypeVar("Item")


class Meter:
    """Tokens a second of training, between two lines of the log."""

    def __init__(self):
        self._start_over()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """While entered, time does not count."""
        before = time.monotonic()
        yield
        self._started += time.monotonic() - before

    def waiting(self, batches: Iterable[Item]) -> Iterator[Item]:
        """The same batches; the time until each is there counts as spent on waiting."""
        iterator = iter(batches)
        while True:
            before = time.monotonic()
            batch = next(iterator, None)
            self._waited += time.monotonic() - before
            if batch is None:
                return
            yield batch

    def count(self, batch: Batch) -> None:
        """Counts the tokens of a batch that was trained on."""
        self._real += real_token_share(batch) * batch.tokens.size
        self._all += batch.tokens.size

    def read(self) -> dict[str, float]:
        """What was measured since the last time.

        Returns:
          `tokens_per_second` (inputs, padding aside), `padding_share` (of the inputs),
          and `data_wait_share`, the part of the time in which the next batch was not
          there yet.
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
