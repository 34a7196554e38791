"""Heartbeats: every process watches all others, and ends itself if one is gone.

A collective operation waits for all processes, so if one died, the rest would wait
forever. Each process writes an increasing number to the key-value store of process 0,
and reads everyone else's.
"""

import contextlib
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from prompt_tuning.processes import crash_reporter

FOLDER = "prompt_tuning/alive"
WAITS, DONE, STOPPED = "waits", "done", "stopped"
"""Written instead of a number by a process that has nothing left to do, that ends, or
that failed."""
ANOTHER_STOPPED = 3
"""The exit code of a process that ends because another did."""

GRACE = 5.0
"""Seconds for a problem that stopped one process to show in the others as well: their
own message is clearer than one about a stopped process."""


class CrashReporter:
    """The script next to this process that reports its death if it is killed."""

    def __init__(self, rank: int, count: int, coordinator: str, advice: str):
        script = Path(crash_reporter.__file__)
        arguments = (str(rank), str(count), coordinator, advice)
        self._script = subprocess.Popen(
            # It needs no site packages; without them it starts in 20 ms.
            [sys.executable, "-E", "-S", str(script), *arguments],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """Ends the script without a report; call it once."""
        self._script.communicate(crash_reporter.DONE)


class HeartbeatMonitor(threading.Thread):
    """Watches the heartbeats of the other processes.

    Attributes:
      silence: seconds without a heartbeat after which a process is considered dead.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        count: int,
        silence: float | int,
        stop: Callable[[str], None],
    ):
        """Prepares the threads; `start` starts them.

        Args:
          store: JAX's client of the key-value store in process 0.
          rank: rank of this process.
          count: number of processes.
          silence: see the class.
          stop: ends this process; called with a description of what happened.
        """
        super().__init__(name="watch other processes", daemon=True)
        self.silence = silence
        self._store, self._rank, self._stop_process = store, rank, stop
        self._period = silence / 10
        self._left = threading.Event()
        self._count = count
        self._answered, self._unanswered_checks = time.monotonic(), 0
        # The last word of each other process, and when it was new.
        self._heard = {
            peer: ("", self._answered) for peer in range(count) if peer != rank
        }
        self._write_lock, self._waits = threading.Lock(), False
        self._exchange_thread = threading.Thread(
            target=self._exchange, name="exchange heartbeats", daemon=True
        )

    def run(self) -> None:
        """Checks until `leave`, or until another process is gone."""
        self._exchange_thread.start()
        while not self._left.wait(self._period):
            problem = self._check()
            if problem is not None and not self._left.is_set():
                self._stop_process(problem)

    def _exchange(self) -> None:
        """Sends and reads heartbeats until `leave`.

        It has a separate thread, because a call to a halted process 0 never returns.
        """
        for beat in itertools.count():
            with self._write_lock:
                self._write(f"{WAITS} {beat}" if self._waits else str(beat))
            self._read()
            if self._left.wait(self._period):
                return

    def finish(self) -> None:
        """Waits, still watching, until the other processes have nothing left to do.

        JAX would notice too late that a process misses its shutdown barrier.
        """
        # A heartbeat from before must not overwrite the word.
        with self._write_lock:
            self._waits = True
            self._write(WAITS)
        pause = 0.01
        while not all(w.startswith((WAITS, DONE)) for w, _ in self._heard.values()):
            time.sleep(pause)
            pause = min(2 * pause, self._period)
            self._read()

    def leave(self, word: str) -> None:
        """Stops watching, and tells the other processes how this one ends."""
        self._left.set()
        self.join()
        # A heartbeat must not overwrite the word.
        self._exchange_thread.join()
        self._write(word)

    def give_up(self, word: str) -> None:
        """Tells the other processes how this one ends; `stop` calls it here."""
        self._left.set()
        # If process 0 is halted, the thread never ends and nobody could read the word.
        self._exchange_thread.join(1.0)
        if not self._exchange_thread.is_alive():
            self._write(word)

    def others_left(self) -> bool:
        """Whether each other process has ended, or is about to."""
        self._read()
        now = time.monotonic()
        return all(
            word.startswith((DONE, STOPPED)) or now - since > self.silence
            for word, since in self._heard.values()
        )

    def _check(self) -> str | None:
        """Describes what happened if a process is gone; None if all are alive.

        A process that was itself halted must not blame another before it has read
        again. So it counts checks instead of measuring time between them, and a
        heartbeat ages only up to the last successful read.
        """
        self._unanswered_checks += 1
        if self._unanswered_checks * self._period > self.silence:
            return (
                f"process 0 of {self._count} has not answered for "
                f"{self.silence:.0f} seconds: it is halted, or cannot be reached"
            )
        for peer, (word, since) in self._heard.items():
            quiet = self._answered - since
            if word.startswith(STOPPED) and quiet > GRACE:
                return f"process {peer} of {self._count} {word}"
            if not word.startswith((DONE, STOPPED)) and quiet > self.silence:
                return (
                    f"process {peer} of {self._count} has not been heard from for "
                    f"{quiet:.0f} seconds: it has died, or cannot be reached"
                )
        return None

    def _write(self, word: str) -> None:
        # `_check` notices an unreachable store because it does not answer.
        with contextlib.suppress(RuntimeError):
            key = f"{FOLDER}/{self._rank}"
            self._store.key_value_set(key, word, allow_overwrite=True)

    def _read(self) -> None:
        try:
            words = dict(self._store.key_value_dir_get(FOLDER))
        except RuntimeError:
            return
        now = time.monotonic()
        for peer, (last_word, _) in self._heard.items():
            word = words.get(f"{FOLDER}/{peer}", "")
            if word != last_word:
                self._heard[peer] = word, now
        # Last, so that no concurrent check takes the words for older than they are.
        self._answered, self._unanswered_checks = now, 0


def end_process(code: int) -> NoReturn:
    """Ends this process now, without JAX's wait for the other processes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
