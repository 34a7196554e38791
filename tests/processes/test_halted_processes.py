"""Processes that are halted but alive, and processes that die when others are done."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from prompt_tuning.processes.crash_reporter import answers
from prompt_tuning.processes.heartbeat import DONE, STOPPED, WAITS, HeartbeatMonitor
from tests.support import several_processes

COORDINATE = """
import sys, jax
jax.distributed.initialize(sys.argv[1], 1, 0)
print("listens", flush=True)
sys.stdin.read()
"""


class HaltedStore:
    """JAX's store while process 0 is halted: no call returns until it continues."""

    def __init__(self):
        self.goes_on = threading.Event()
        self.words = {}

    def key_value_set(self, key: str, value: str, allow_overwrite: bool) -> None:
        assert allow_overwrite
        self.goes_on.wait()
        self.words[key] = value

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        self.goes_on.wait()
        return [*self.words.items(), (f"{key}/0", str(time.monotonic()))]


def test_a_call_that_does_not_return_is_detected():
    store, reports = HaltedStore(), []
    watcher = HeartbeatMonitor(store, 1, 2, 0.2, reports.append)
    begun = time.monotonic()
    watcher.start()
    while not reports and time.monotonic() < begun + 10:
        time.sleep(0.01)
    # Not too early, and not again once process 0 continues.
    assert time.monotonic() - begun > 0.2
    assert reports[0].startswith("process 0 of 2 has not answered for")
    store.goes_on.set()
    time.sleep(0.1)
    before = len(reports)
    time.sleep(0.1)
    assert len(reports) == before
    watcher.leave(DONE)
    assert store.words["prompt_tuning/alive/1"] == DONE


class SharedStore(dict):
    """JAX's store, shared by all processes."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool) -> None:
        assert allow_overwrite
        self[key] = value

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        return list(self.items())


def test_a_death_after_another_process_has_finished_is_detected():
    store, reports = SharedStore(), []
    first, second = (
        HeartbeatMonitor(store, n, 2, 0.5, reports.append) for n in range(2)
    )
    first.start()
    second.start()
    # The first has nothing left to do and waits for the second, which is alive, ...
    waiting = threading.Thread(target=first.finish, daemon=True)
    waiting.start()
    time.sleep(0.8)
    assert waiting.is_alive() and not reports
    # ... and then sends no more heartbeats.
    second.leave("5")
    until = time.monotonic() + 10
    while not reports and time.monotonic() < until:
        time.sleep(0.01)
    assert reports[0].startswith("process 1 of 2 has not been heard from")
    store["prompt_tuning/alive/1"] = WAITS
    waiting.join(10)
    assert not waiting.is_alive()
    assert store["prompt_tuning/alive/0"].startswith(WAITS)
    first.leave(DONE)


def test_all_remaining_processes_report_the_lost_one_and_process_0_is_told():
    store, reports = SharedStore(), {}

    def stop(message: str) -> None:
        reports[1] = message
        second.give_up(STOPPED)

    first = HeartbeatMonitor(
        store, 0, 3, 0.3, lambda message: reports.setdefault(0, message)
    )
    second = HeartbeatMonitor(store, 1, 3, 0.3, stop)
    first.start()
    second.start()
    assert not first.others_left()
    until = time.monotonic() + 10
    while not (len(reports) == 2 and first.others_left()):
        assert time.monotonic() < until, reports
        time.sleep(0.01)
    for message in reports.values():
        assert message.startswith("process 2 of 3 has not been heard from")
    assert store["prompt_tuning/alive/1"] == STOPPED
    first.leave(DONE)


@pytest.fixture
def coordinator():
    """A single process 0 and its address."""
    address = f"127.0.0.1:{several_processes.free_port()}"
    process = subprocess.Popen(
        [sys.executable, "-c", COORDINATE, address],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"listens\n"
        yield process, address
        process.kill()


def test_a_stopped_coordinator_does_not_answer(coordinator):
    process, address = coordinator
    assert answers(address, 60.0)
    process.send_signal(signal.SIGSTOP)
    # Until it is halted.
    os.waitpid(process.pid, os.WUNTRACED)
    assert not answers(address, 0.5)
    process.kill()
    process.wait()
    assert not answers(address, 60.0)
