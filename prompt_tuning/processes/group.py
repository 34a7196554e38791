"""Processes that run one command together.

All processes run the same program on the same config, and JAX joins their devices into
one mesh. Every process plans and builds every batch, puts the rows of its own devices
on them, and takes part in every step. Only process 0 prints and writes files. If all
processes need the content of a file that it writes, process 0 reads it and broadcasts
the result (`run_on_first`).

Broadcasts use the key-value store of JAX's runtime in process 0. The store needs no
device, so a broadcast neither waits for steps in progress nor blocks a thread.
"""

import contextlib
import hashlib
import itertools
import json
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from prompt_tuning.core.errors import InputError, differences
from prompt_tuning.core.interrupts import INTERRUPTED
from prompt_tuning.core.private_parts import private_part
from prompt_tuning.core.typed_json import parse_json
from prompt_tuning.processes.heartbeat import (
    ANOTHER_STOPPED,
    DONE,
    GRACE,
    STOPPED,
    CrashReporter,
    HeartbeatMonitor,
    end_process,
)
from prompt_tuning.processes.process_launch import Launch

FIRST = "first"
"""Instead of an address, of the process that the others measure theirs toward."""

WAIT = 24 * 3600 * 1000
"""Timeout in milliseconds, longer than any operation takes: while a process waits for
another, the heartbeat monitor checks that the other is alive."""


class ProcessGroup:
    """The joined processes of a command.

    Attributes:
      store: JAX's client of the key-value store.
      rank: rank of this process.
      count: number of processes.
      coordinator: host of process 0.
    """

    def __init__(self, store: Any, rank: int, count: int, coordinator: str = ""):
        self.store, self.rank, self.count = store, rank, count
        self.coordinator = coordinator
        # All processes make the same calls in the same order, so the numbers agree.
        self._calls = itertools.count()

    def run_on_first(self, work: Callable[[], Any]) -> Any:
        """Runs work on process 0 and broadcasts it; see the function `run_on_first`."""
        key = self._next_key()
        if self.rank:
            text = self.store.blocking_key_value_get(key, WAIT)
            message = parse_json(text, "the message of process 0")
            if "problem" in message:
                raise InputError(message["problem"])
            return message["value"]
        try:
            value = work()
        except InputError as problem:
            self.store.key_value_set(key, json.dumps({"problem": str(problem)}))
            raise
        self.store.key_value_set(key, json.dumps({"value": value}))
        return value

    def check_same(self, noun: str, lines: Sequence[str]) -> None:
        """Compares lines among processes; see the function `check_same`."""
        key, text = self._next_key(), "\n".join(lines)
        digest = hashlib.sha256(text.encode()).hexdigest()
        self.store.key_value_set(f"{key}/text/{self.rank}", text)
        self.store.key_value_set(f"{key}/digest/{self.rank}", digest)
        self.store.wait_at_barrier(f"{key}/barrier", WAIT)
        digests = {
            int(name.rpartition("/")[2]): value
            for name, value in self.store.key_value_dir_get(f"{key}/digest")
        }
        unequal = [n for n in sorted(digests) if digests[n] != digests[0]]
        if unequal:
            first, theirs = (
                self.store.blocking_key_value_get(f"{key}/text/{n}", WAIT).split("\n")
                for n in (0, unequal[0])
            )
            shown = "\n  ".join(differences(first, theirs))
            raise InputError(
                f"process {unequal[0]} of {self.count} has other {noun} than process 0 "
                f"(- process 0's, + process {unequal[0]}'s):\n  {shown}\nstart all "
                "processes with the same"
            )

    def share(self, text: str) -> list[str]:
        """Returns the texts of all processes; see the function `share`."""
        key = self._next_key()
        self.store.key_value_set(f"{key}/{self.rank}", text)
        return [
            self.store.blocking_key_value_get(f"{key}/{n}", WAIT)
            for n in range(self.count)
        ]

    def wait_for_all(self) -> None:
        """Waits for the other processes; see the function `wait_for_all`."""
        self.store.wait_at_barrier("prompt_tuning/all", WAIT)

    def own_address(self) -> str:
        """Returns this machine's address; see the function `own_address`."""
        address = _address_toward(self.coordinator) if self.rank else FIRST
        # A machine often knows itself by an address that others do not reach.
        addresses = self.share(address)
        return address if self.rank else _address_toward(addresses[1])

    def _next_key(self) -> str:
        return f"prompt_tuning/call/{next(self._calls)}"


_group: ProcessGroup | None = None


def is_first() -> bool:
    """Tests whether this process writes and prints: the only one, or process 0."""
    return _group is None or _group.rank == 0


def count() -> int:
    """Returns the number of processes that run the command."""
    return 1 if _group is None else _group.count


def run_on_first(work: Callable[[], Any]) -> Any:
    """Runs a function on process 0 only, and returns its result on every process.

    Every process waits for the result, which must be JSON-serializable. All processes
    must call the functions of this module in the same order.

    Raises:
      InputError: on every process, if `work` raises it.
    """
    return work() if _group is None else _group.run_on_first(work)


def check_same(noun: str, describe: Callable[[], Sequence[str]]) -> None:
    """Checks that all processes have the same input.

    Args:
      noun: name of the input in the plural, for the message.
      describe: returns lines that identify the input; not called in a single process.

    Raises:
      InputError: on every process; gives the lines that differ from process 0.
    """
    if _group is not None:
        _group.check_same(noun, describe())


def share(text: str) -> list[str]:
    """Sends a nonempty text to all processes, and returns everyone's texts by rank."""
    return [text] if _group is None else _group.share(text)


def wait_for_all() -> None:
    """Waits until all processes have called this function as often as this one."""
    if _group is not None:
        _group.wait_for_all()


def own_address() -> str:
    """Returns the IP address where the other processes reach this machine."""
    return "127.0.0.1" if _group is None else _group.own_address()


def _address_toward(host: str) -> str:
    """Returns this machine's address on the way to another one; sends nothing."""
    kind = socket.SOCK_DGRAM
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=kind)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def run_together(
    launch: Launch, command: Callable[[], int], *, advice: str, ends_on_sigterm: bool
) -> int:
    """Joins the other processes, runs the command with them, and leaves.

    If this process fails, it tells all others. If another process is gone, this one
    ends with the exit code `ANOTHER_STOPPED`, whatever it is waiting for.

    Args:
      launch: how the processes find each other.
      command: returns the exit code; a nonzero code stops the other processes, too,
        except for `INTERRUPTED`, with which all have stopped after the same step.
      advice: what to do if a process is gone, for the message.
      ends_on_sigterm: whether SIGTERM ends this process immediately; otherwise the
        command checks for it (see `training.signals`).

    Returns:
      0 or `INTERRUPTED`; with any other exit code, the process ends here.

    Raises:
      InputError: if the processes do not find each other.
    """
    global _group
    _group, reporter = _join(launch, advice)
    rank = _group.rank
    if ends_on_sigterm:
        # JAX has replaced the handler with its own, which notifies all processes.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    monitor = HeartbeatMonitor(
        _group.store,
        rank,
        _group.count,
        launch.silence,
        lambda problem: _stop(monitor, reporter, rank, f"{problem}; {advice}"),
    )
    monitor.start()
    together = False
    try:
        code = command()
        together = code in (0, INTERRUPTED)
        if together:
            monitor.finish()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception:
        traceback.print_exc()
        _wait_for_diagnosis(monitor, rank)
        code = 1
    if not together:
        _leave_early(monitor, reporter, rank, code)
    monitor.leave(DONE)
    _shut_down()
    reporter.dismiss()
    _group = None
    return code


def _join(launch: Launch, advice: str) -> tuple[ProcessGroup, CrashReporter]:
    """Joins the other processes and starts this process's crash reporter.

    Raises:
      InputError: if the processes do not find each other.
    """
    import jax

    reporter = _start_early_reporter(launch, advice)
    try:
        jax.distributed.initialize(
            launch.coordinator,
            launch.processes,
            launch.process,
            # JAX also ends processes whose heartbeat stops, with a less clear message:
            # its timeout is longer, so that `HeartbeatMonitor` acts first.
            heartbeat_timeout_seconds=int(2 * (launch.silence + GRACE)),
            # The others finish before process 0, which writes the last checkpoint.
            shutdown_timeout_seconds=WAIT // 1000,
        )
    except (ValueError, RuntimeError) as problem:
        if reporter is not None:
            reporter.dismiss()
        raise InputError(
            f"the processes did not find each other ({problem}); give each "
            "--coordinator HOST:PORT --processes N --process I, where all of them can "
            "reach process 0 at HOST:PORT"
        ) from problem
    # JAX's own libraries use this store too, but it has no public name yet.
    state = private_part("jax._src.distributed.global_state")
    rank, count, address = (
        state.process_id,
        state.num_processes,
        state.coordinator_address,
    )
    assert state.client is not None and address is not None
    host = address.rpartition(":")[0].strip("[]")
    group = ProcessGroup(state.client, rank, count, host)
    return group, reporter or CrashReporter(rank, count, address, advice)


def _start_early_reporter(launch: Launch, advice: str) -> CrashReporter | None:
    """Starts the crash reporter before joining, if the launch has this process's rank.

    JAX aborts a process that waits for process 0 in vain.
    """
    if launch.coordinator is None:
        return None
    assert launch.processes is not None and launch.process is not None
    if launch.process == 0:
        _check_port(launch.coordinator)
    return CrashReporter(launch.process, launch.processes, launch.coordinator, advice)


def _check_port(coordinator: str) -> None:
    """Checks that process 0 can listen on its port; JAX would abort if it cannot.

    Raises:
      InputError: gives the reason.
    """
    port = int(coordinator.rpartition(":")[2])
    try:
        with socket.create_server(("", port)):
            pass
    except (OSError, OverflowError) as problem:
        raise InputError(
            f"process 0 cannot listen on port {port} of --coordinator {coordinator} "
            f"({problem}); choose another port, the same for all processes"
        ) from problem


def _shut_down() -> None:
    import jax

    jax.distributed.shutdown()


def _leave_early(
    monitor: HeartbeatMonitor, reporter: CrashReporter, rank: int, code: int
) -> NoReturn:
    """Tells all other processes that this one failed, and ends it."""
    monitor.leave(_stopped_word(code))
    _wait_for_others(monitor, rank)
    reporter.dismiss()
    end_process(code)


def _stop(
    monitor: HeartbeatMonitor, reporter: CrashReporter, rank: int, problem: str
) -> None:
    """Ends this process because another one is gone."""
    print(f"prompt-tuning: {problem}", file=sys.stderr, flush=True)
    monitor.give_up(_stopped_word(ANOTHER_STOPPED))
    _wait_for_others(monitor, rank)
    reporter.dismiss()
    end_process(ANOTHER_STOPPED)


def _stopped_word(code: int) -> str:
    return f"{STOPPED} with exit code {code}; see its own messages"


def _wait_for_others(monitor: HeartbeatMonitor, rank: int) -> None:
    """Lets process 0 wait a while until the rest have read how it ended.

    The key-value store that they read it from ends with process 0.
    """
    deadline = time.monotonic() + 2 * GRACE
    while rank == 0 and time.monotonic() < deadline and not monitor.others_left():
        time.sleep(0.2)


def _wait_for_diagnosis(monitor: HeartbeatMonitor, rank: int) -> None:
    """Waits for the monitor to find that another process caused a failure here.

    A process often learns of another's death from a collective operation that fails.
    """
    print(
        f"prompt-tuning: process {rank} failed as above; looking for "
        f"{monitor.silence:.0f} seconds whether another process is gone",
        file=sys.stderr,
    )
    with contextlib.suppress(KeyboardInterrupt):
        time.sleep(1.2 * monitor.silence + GRACE)
