"""The number of cores on systems that report it in different ways."""

import os
import sys

import pytest

from prompt_tuning.data.preparation.worker_pool import available_cores


def test_all_cores_are_counted_without_affinity(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    monkeypatch.setattr(os, "process_cpu_count", lambda: 7, raising=False)
    assert available_cores() == 7
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    monkeypatch.setattr(os, "process_cpu_count", lambda: None, raising=False)
    assert available_cores() == 1


@pytest.mark.skipif(
    sys.version_info >= (3, 13) or not hasattr(os, "sched_getaffinity"),
    reason="this Python or system does not ask for them by this function",
)
def test_a_process_may_be_excluded_from_some_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 4, 5})
    assert available_cores() == 3
