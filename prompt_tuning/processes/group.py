"""Several processes that run one command together.

All run the same program on the same config: JAX makes one mesh of their devices, every
process plans and builds every batch and puts its devices' rows of it, and all take part
in every step. Process 0 alone writes: the log, checkpoints, what is printed. Where the
others go by what is on the disk, process 0 reads it and tells them (`on_first`).

What is told goes through the key-value store of JAX's runtime, which process 0 keeps.
It needs no device, so that it neither waits for steps under way nor stops a thread.
"""

import contextlib
import dataclasses
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
from prompt_tuning.processes.heartbeat import (
    ANOTHER_STOPPED,
    DONE,
    GRACE,
    STOPPED,
    CrashReporter,
    HeartbeatMonitor,
    end_process,
)

SILENCE = 25.0
"""Seconds without a word after which a process is taken for dead."""

INTERRUPTED = 130
"""The exit code that shells give for SIGINT."""

WAIT = 24 * 3600 * 1000
"""Milliseconds, more than anything takes: while a process waits for another, the
watcher sees to it that the other lives."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """How the processes of a command find each other.

    Attributes:
      coordinator: HOST:PORT, of process 0, where it listens and the others ask; None,
        as the other two, to find out from SLURM, Open MPI, Kubernetes or a TPU pod.
      processes: how many there are.
      process: the number of this one, from 0.
      silence: seconds without a word after which a process is taken for dead.

    Raises:
      InputError: if they are neither all given nor all left out, or out of range.
    """

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    silence: float = SILENCE

    def __post_init__(self):
        given = (self.coordinator, self.processes, self.process)
        missing = [
            flag
            for flag, value in zip(
                ("--coordinator", "--processes", "--process"), given, strict=True
            )
            if value is None
        ]
        if self.silence < 1:
            raise InputError(f"--silence is {self.silence}, expected at least 1 second")
        if len(missing) == 3:
            return
        if missing:
            raise InputError(
                f"{' and '.join(missing)} must be given with the others: "
                "--coordinator HOST:PORT --processes N --process I, or --distributed "
                "in their place under SLURM, Open MPI, Kubernetes or on a TPU pod"
            )
        assert self.coordinator and self.processes is not None
        assert self.process is not None
        host, colon, port = self.coordinator.rpartition(":")
        if not (host and colon and port.isdecimal()):
            raise InputError(
                f"--coordinator is {self.coordinator!r}, expected the HOST:PORT at "
                "which process 0 is to listen"
            )
        if not 0 <= self.process < self.processes:
            raise InputError(
                f"--process is {self.process} of --processes {self.processes}, "
                "expected a number from 0 to one less than there are"
            )


class ProcessGroup:
    """The processes of a command, joined.

    Attributes:
      store: JAX's client of the key-value store.
      number: of this process.
      count: of all.
    """

    def __init__(self, store: Any, number: int, count: int):
        self.store, self.number, self.count = store, number, count
        # All processes come to the same calls in the same order.
        self._calls = itertools.count()

    def run_on_first(self, work: Callable[[], Any]) -> Any:
        """What process 0 finds, on every process; see the function of this name."""
        key = self._next_key()
        if self.number:
            found = json.loads(self.store.blocking_key_value_get(key, WAIT))
            if "problem" in found:
                raise InputError(found["problem"])
            return found["value"]
        try:
            value = work()
        except InputError as problem:
            self.store.key_value_set(key, json.dumps({"problem": str(problem)}))
            raise
        self.store.key_value_set(key, json.dumps({"value": value}))
        return value

    def check_same(self, what: str, lines: Sequence[str]) -> None:
        """Refuses what is not the same everywhere; see the function of this name."""
        key, text = self._next_key(), "\n".join(lines)
        digest = hashlib.sha256(text.encode()).hexdigest()
        self.store.key_value_set(f"{key}/text/{self.number}", text)
        self.store.key_value_set(f"{key}/digest/{self.number}", digest)
        self.store.wait_at_barrier(f"{key}/barrier", WAIT)
        digests = {
            int(name.rpartition("/")[2]): found
            for name, found in self.store.key_value_dir_get(f"{key}/digest")
        }
        others = [n for n in sorted(digests) if digests[n] != digests[0]]
        if others:
            first, other = (
                self.store.blocking_key_value_get(f"{key}/text/{n}", WAIT).split("\n")
                for n in (0, others[0])
            )
            shown = "\n  ".join(differences(first, other))
            raise InputError(
                f"process {others[0]} of {self.count} has other {what} than process 0 "
                f"(- process 0's, + process {others[0]}'s):\n  {shown}\nstart all "
                "processes with the same"
            )

    def _next_key(self) -> str:
        return f"prompt_tuning/call/{next(self._calls)}"


_group: ProcessGroup | None = None


def is_first() -> bool:
    """Whether this process writes and prints: the only one, or process 0."""
    return _group is None or _group.number == 0


def count() -> int:
    """How many processes run the command."""
    return 1 if _group is None else _group.count


def run_on_first(work: Callable[[], Any]) -> Any:
    """Does something on process 0 alone, and gives every process what it found.

    Every process waits for it. All must call it, in the same order as what else they
    call of this module.

    Args:
      work: gives something that JSON can hold.

    Raises:
      InputError: on every process, if `work` raises it.
    """
    return work() if _group is None else _group.run_on_first(work)


def check_same(what: str, describe: Callable[[], Sequence[str]]) -> None:
    """Refuses to go on where the processes were not given the same.

    Args:
      what: they were given, in the plural.
      describe: gives lines that tell one from another; not called in one process.

    Raises:
      InputError: on every process, with the lines in which one differs from process 0.
    """
    if _group is not None:
        _group.check_same(what, describe())


def run_together(
    launch: Launch, command: Callable[[], int], *, advice: str, ends_on_sigterm: bool
) -> int:
    """Joins the other processes, runs the command with them, and leaves.

    Where this process fails, the others are told; where another is gone, this one ends
    with the exit code `ANOTHER_STOPPED`, whatever it is waiting for.

    Args:
      launch: how they find each other.
      command: gives the exit code; anything but 0 stops the others too.
      advice: what to do when a process is gone.
      ends_on_sigterm: whether SIGTERM ends this process at once; else the command asks
        for it (see `training.signals`).

    Returns:
      0; with another exit code, the process ends here.

    Raises:
      InputError: if the processes do not find each other.
    """
    global _group
    _group, words = _join(launch, advice)
    number = _group.number
    if ends_on_sigterm:
        # JAX takes the signal for its own, to tell all processes of it.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    watcher = HeartbeatMonitor(
        _group.store,
        number,
        _group.count,
        launch.silence,
        lambda found: _stop(watcher, words, number, f"{found}; {advice}"),
    )
    watcher.start()
    try:
        code = command()
        if not code:
            watcher.finish()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception:
        traceback.print_exc()
        _await_verdict(watcher, number)
        code = 1
    if code:
        _leave_early(watcher, words, number, code)
    watcher.leave(DONE)
    _leave()
    words.dismiss()
    _group = None
    return code


def _join(launch: Launch, advice: str) -> tuple[ProcessGroup, CrashReporter]:
    """Meets the other processes.

    Raises:
      InputError: if they cannot be looked for.
    """
    import jax
    from jax._src import distributed

    words = _words_of(launch, advice)
    try:
        jax.distributed.initialize(
            launch.coordinator,
            launch.processes,
            launch.process,
            # JAX's watch ends a process too, less clearly: it is the second to look.
            heartbeat_timeout_seconds=int(2 * (launch.silence + GRACE)),
            # The others are done before process 0, which writes the last checkpoint.
            shutdown_timeout_seconds=WAIT // 1000,
        )
    except (ValueError, RuntimeError) as problem:
        if words is not None:
            words.dismiss()
        raise InputError(
            f"the processes did not find each other ({problem}); give each "
            "--coordinator HOST:PORT --processes N --process I, where process 0 is to "
            "be reached at HOST:PORT by all"
        ) from problem
    # JAX's libraries use its store too, but it has no public name yet.
    state = distributed.global_state
    number, count, address = (
        state.process_id,
        state.num_processes,
        state.coordinator_address,
    )
    assert state.client is not None and address is not None
    group = ProcessGroup(state.client, number, count)
    return group, words or CrashReporter(number, count, address, advice)


def _words_of(launch: Launch, advice: str) -> CrashReporter | None:
    """Speaks for this process from before it meets the others, if its place is known.

    JAX ends a process that waits for process 0 in vain.
    """
    if launch.coordinator is None:
        return None
    assert launch.processes is not None and launch.process is not None
    if launch.process == 0:
        _check_port(launch.coordinator)
    return CrashReporter(launch.process, launch.processes, launch.coordinator, advice)


def _check_port(coordinator: str) -> None:
    """Refuses a port that process 0 cannot listen on, for which JAX would abort.

    Raises:
      InputError: with what is wrong.
    """
    port = int(coordinator.rpartition(":")[2])
    try:
        with socket.create_server(("", port)):
            pass
    except (OSError, OverflowError) as problem:
        raise InputError(
            f"process 0 cannot listen on port {port} of --coordinator {coordinator} "
            f"({problem}); name another, the same to all processes"
        ) from problem


def _leave() -> None:
    import jax

    jax.distributed.shutdown()


def _leave_early(
    watcher: HeartbeatMonitor, words: CrashReporter, number: int, code: int
) -> NoReturn:
    """Ends this process where it failed, and says so to the others."""
    watcher.leave(_stopped(code))
    _leave_last(watcher, number)
    words.dismiss()
    end_process(code)


def _stop(
    watcher: HeartbeatMonitor, words: CrashReporter, number: int, found: str
) -> None:
    """Ends this process because another is gone."""
    print(f"prompt-tuning: {found}", file=sys.stderr, flush=True)
    watcher.give_up(_stopped(ANOTHER_STOPPED))
    _leave_last(watcher, number)
    words.dismiss()
    end_process(ANOTHER_STOPPED)


def _stopped(code: int) -> str:
    return f"{STOPPED} with exit code {code}; its own messages say why"


def _leave_last(watcher: HeartbeatMonitor, number: int) -> None:
    """Has process 0 wait a while for the others to find out what it has.

    The store goes with it, and with that what they are to read.
    """
    until = time.monotonic() + 2 * GRACE
    while number == 0 and time.monotonic() < until and not watcher.others_left():
        time.sleep(0.2)


def _await_verdict(watcher: HeartbeatMonitor, number: int) -> None:
    """Waits for the watcher to find out that another process is what failed here.

    A process whose neighbour is killed often learns it by an operation that fails.
    """
    print(
        f"prompt-tuning: process {number} failed as above; looking for "
        f"{watcher.silence:.0f} seconds whether another process is gone",
        file=sys.stderr,
    )
    with contextlib.suppress(KeyboardInterrupt):
        time.sleep(1.2 * watcher.silence + GRACE)
