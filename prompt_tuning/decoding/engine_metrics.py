"""Counters of an engine's work."""

import time
from collections import deque
from typing import NamedTuple

RECENT = 1024
"""Number of latest rows and steps that means cover."""


class EngineMetrics(NamedTuple):
    """A snapshot of an engine.

    `tokens_per_second` and `first_token_seconds` (from submission to the first token; 0
    before the first) are means over the latest steps and rows. `key_value_bytes` is the
    size of the keys and values of all slots, prompts and shared texts.
    """

    slots: int
    active: int
    queued: int
    requests: int
    finished: int
    cancelled: int
    given_tokens: int
    new_tokens: int
    tokens_per_second: float
    first_token_seconds: float
    key_value_bytes: int


class MetricCounters:
    """Counters that an engine increments."""

    def __init__(self):
        self._requests = self._finished = self._cancelled = 0
        self._given = self._new = 0
        self._waits: deque[float] = deque(maxlen=RECENT)
        self._steps: deque[tuple[float, int]] = deque(maxlen=RECENT)

    def now(self) -> float:
        """Returns the clock that waiting times are measured with."""
        return time.monotonic()

    def submitted(self, tokens: int) -> None:
        """Counts a request and its tokens."""
        self._requests += 1
        self._given += tokens

    def first_token(self, submitted: float) -> None:
        """Records the first token of a row, given the time it was submitted."""
        self._waits.append(self.now() - submitted)

    def generated(self, tokens: int) -> None:
        """Counts the tokens of a step."""
        self._new += tokens
        self._steps.append((self.now(), tokens))

    def ended(self, *, cancelled: bool = False) -> None:
        """Counts a row that ended."""
        if cancelled:
            self._cancelled += 1
        else:
            self._finished += 1

    def snapshot(
        self, slots: int, active: int, queued: int, key_value_bytes: int
    ) -> EngineMetrics:
        """Returns the counts so far, with the engine's current state."""
        rate = 0.0
        if len(self._steps) > 1:
            seconds = self._steps[-1][0] - self._steps[0][0]
            tokens = sum(count for _, count in list(self._steps)[1:])
            rate = tokens / seconds if seconds > 0 else 0.0
        waits = self._waits
        return EngineMetrics(
            slots=slots,
            active=active,
            queued=queued,
            requests=self._requests,
            finished=self._finished,
            cancelled=self._cancelled,
            given_tokens=self._given,
            new_tokens=self._new,
            tokens_per_second=rate,
            first_token_seconds=sum(waits) / len(waits) if waits else 0.0,
            key_value_bytes=key_value_bytes,
        )
