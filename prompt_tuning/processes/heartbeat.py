"""Every process watches all others, and ends itself when one is gone.

A collective operation waits for all processes, so without one of them the others would
wait for ever. Each writes a rising number into the store that process 0 keeps for all,
and reads the others'.
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
"""What a process says in place of its number: that it has nothing left to do, that it
ends, that it failed."""
ANOTHER_STOPPED = 3
"""The exit code of a process that ends because another did."""

GRACE = 5.0
"""Seconds for what stopped one process to show in the others too: their own message is
clearer than that one has stopped."""


class CrashReporter:
    """The script beside this process that speaks for it if it is killed."""

    def __init__(self, number: int, count: int, coordinator: str, advice: str):
        script = Path(crash_reporter.__file__)
        arguments = (str(number), str(count), coordinator, advice)
        self._script = subprocess.Popen(
            # Without site packages, which it needs none of: it starts in 20 ms.
            [sys.executable, "-E", "-S", str(script), *arguments],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """This process has said all itself; call it once."""
        self._script.communicate(crash_reporter.DONE)


class HeartbeatMonitor(threading.Thread):
    """Watches the other processes.

    Attributes:
      silence: seconds without a word after which a process is taken for dead.
    """

    def __init__(
        self,
        store: Any,
        number: int,
        count: int,
        silence: float,
        stop: Callable[[str], None],
    ):
        """Starts nothing yet.

        Args:
          store: JAX's client of the key-value store that process 0 keeps.
          number: of this process.
          count: of all.
          silence: see the class.
          stop: ends this process; given what happened.
        """
        super().__init__(name="watch other processes", daemon=True)
        self.silence = silence
        self._store, self._number, self._stop_process = store, number, stop
        self._period = silence / 10
        self._left = threading.Event()
        self._count = count
        self._answered, self._unanswered_looks = time.monotonic(), 0
        # Of each other process what it said last, and when that was new.
        self._heard = {
            other: ("", self._answered) for other in range(count) if other != number
        }
        self._saying, self._waits = threading.Lock(), False
        self._asking = threading.Thread(
            target=self._ask, name="ask for other processes", daemon=True
        )

    def run(self) -> None:
        """Looks until `leave`, or until another process is gone."""
        self._asking.start()
        while not self._left.wait(self._period):
            found = self._look()
            if found is not None and not self._left.is_set():
                self._stop_process(found)

    def _ask(self) -> None:
        """Beats and reads until `leave`.

        In a thread of its own: where process 0 is halted, a call does not come back.
        """
        for beat in itertools.count():
            with self._saying:
                self._say(f"{WAITS} {beat}" if self._waits else str(beat))
            self._read()
            if self._left.wait(self._period):
                return

    def finish(self) -> None:
        """Waits until the others have nothing left to do either, and watches them.

        Who is missing where JAX has all processes end together is found out late.
        """
        # No beat of before may come after the word.
        with self._saying:
            self._waits = True
            self._say(WAITS)
        pause = 0.01
        while not all(w.startswith((WAITS, DONE)) for w, _ in self._heard.values()):
            time.sleep(pause)
            pause = min(2 * pause, self._period)
            self._read()

    def leave(self, word: str) -> None:
        """Watches no longer, and says to the others how this process ends."""
        self._left.set()
        self.join()
        # No beat may come after the word.
        self._asking.join()
        self._say(word)

    def give_up(self, word: str) -> None:
        """Says to the others how this process ends, from within `stop`."""
        self._left.set()
        # Where process 0 is halted, nobody hears it.
        self._asking.join(1.0)
        if not self._asking.is_alive():
            self._say(word)

    def others_left(self) -> bool:
        """Whether each other process has ended, or is about to."""
        self._read()
        now = time.monotonic()
        return all(
            word.startswith((DONE, STOPPED)) or now - since > self.silence
            for word, since in self._heard.values()
        )

    def _look(self) -> str | None:
        """What has happened, if a process is gone.

        A process that was halted itself finds nothing amiss before it has read again:
        looks are counted, not the time between them, and the others are as old as they
        were when they were last read.
        """
        self._unanswered_looks += 1
        if self._unanswered_looks * self._period > self.silence:
            return (
                f"process 0 of {self._count} has not answered for "
                f"{self.silence:.0f} seconds: it is halted, or cannot be reached"
            )
        for other, (word, since) in self._heard.items():
            quiet = self._answered - since
            if word.startswith(STOPPED) and quiet > GRACE:
                return f"process {other} of {self._count} {word}"
            if not word.startswith((DONE, STOPPED)) and quiet > self.silence:
                return (
                    f"process {other} of {self._count} has not been heard of for "
                    f"{quiet:.0f} seconds: it has died, or cannot be reached"
                )
        return None

    def _say(self, word: str) -> None:
        # An unreachable store is found out by not answering, in `_look`.
        with contextlib.suppress(RuntimeError):
            own = f"{FOLDER}/{self._number}"
            self._store.key_value_set(own, word, allow_overwrite=True)

    def _read(self) -> None:
        try:
            found = dict(self._store.key_value_dir_get(FOLDER))
        except RuntimeError:
            return
        now = time.monotonic()
        for other, (before, _) in self._heard.items():
            word = found.get(f"{FOLDER}/{other}", "")
            if word != before:
                self._heard[other] = word, now
        # Last, so that no look finds what was heard older than it is.
        self._answered, self._unanswered_looks = now, 0


def end_process(code: int) -> NoReturn:
    """Ends this process now, without JAX's wait for the others to be done too."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
