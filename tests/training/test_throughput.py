"""Compares the meter's measurements with the known times of a run."""

import itertools

import numpy as np
import pytest

from prompt_tuning.core.batch import Batch
from prompt_tuning.training import throughput


class Clock:
    """A clock that advances only on request."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    fake_clock = Clock()
    monkeypatch.setattr(throughput, "time", fake_clock)
    return fake_clock


def batch(lengths: list[int]) -> Batch:
    """Rows of 10 tokens; rows of length 0 are fillers."""
    count = len(lengths)
    weights = np.zeros((count, 1), np.float32)
    weights[np.array(lengths) > 0] = 1
    tokens = np.zeros((count, 10), np.int32)
    row = np.maximum(lengths, 1).astype(np.int32)
    zeros = np.zeros((count, 1), np.int32)
    return Batch(tokens, row, tokens, zeros, weights, zeros[:, 0])


def test_tokens_and_padding_are_counted_since_the_last_line(clock):
    meter = throughput.Meter()
    meter.count(batch([10, 5]))
    meter.count(batch([1, 0]))
    clock.now += 4
    expected = {"tokens_per_second": 4, "padding_share": 0.6, "data_wait_share": 0}
    assert meter.read() == pytest.approx(expected)
    clock.now += 2
    meter.count(batch([10]))
    expected = {"tokens_per_second": 5, "padding_share": 0, "data_wait_share": 0}
    assert meter.read() == pytest.approx(expected)


def test_the_fraction_of_time_spent_waiting_for_batches(clock):
    def slow():
        for lengths in ([1], [2], [3]):
            clock.now += 1
            yield batch(lengths)

    meter = throughput.Meter()
    met = []
    for each in meter.waiting(slow()):
        met.append(int(each.lengths[0]))
        clock.now += 4
    assert met == [1, 2, 3]
    assert meter.read()["data_wait_share"] == pytest.approx(3 / 15)


def test_time_outside_steps_is_not_counted(clock):
    meter = throughput.Meter()
    meter.count(batch([10]))
    clock.now += 1
    with meter.stopped():
        clock.now += 100
    clock.now += 1
    assert meter.read()["tokens_per_second"] == pytest.approx(5)


def test_batches_are_not_requested_before_they_are_needed():
    counter = itertools.count()
    batches = throughput.Meter().waiting(batch([next(counter) + 1]) for _ in range(9))
    next(batches)
    next(batches)
    assert next(counter) == 2
