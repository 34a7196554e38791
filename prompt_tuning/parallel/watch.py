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

from prompt_tuning.parallel import last_words

FOLDER = "prompt_tuning/alive"
DONE, STOPPED = "done", "stopped"
ANOTHER_STOPPED = 3
"""The exit code of a process that ends because another did."""

GRACE = 5.0
"""Seconds for what stopped one process to show in the others too: their own message is
clearer than that one has stopped."""


class LastWords:
    """The script beside this process that speaks for it if it is killed."""

    def __init__(self, number: int, count: int, coordinator: str, advice: str):
        script = Path(last_words.__file__)
        arguments = (str(number), str(count), coordinator, advice)
        self._script = subprocess.Popen(
            # Without site packages, which it needs none of: it starts in 20 ms.
            [sys.executable, "-E", "-S", str(script), *arguments],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def take_back(self) -> None:
        """This process has said all itself; call it once."""
        self._script.communicate(last_words.DONE)


class Watcher(threading.Thread):
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
        self._beats = itertools.count()
        now = time.monotonic()
        others = [other for other in range(count) if other != number]
        self._count = count
        self._words: dict[int, str] = dict.fromkeys(others, "")
        self._heard: dict[int, float] = dict.fromkeys(others, now)
        self._answered = now

    def run(self) -> None:
        """Beats and looks until `leave`, or until another process is gone."""
        while not self._left.is_set():
            found = self._look()
            if found is not None and not self._left.is_set():
                self._stop_process(found)
            self._left.wait(self._period)

    def leave(self, word: str) -> None:
        """Watches no longer, and says to the others how this process ends."""
        self._left.set()
        self.join()
        self._say(word)

    def others_left(self) -> bool:
        """Whether each other process has ended, or is about to."""
        self._read()
        now = time.monotonic()
        return all(
            word.startswith((DONE, STOPPED)) or now - self._heard[other] > self.silence
            for other, word in self._words.items()
        )

    def _look(self) -> str | None:
        """What has happened, if a process is gone."""
        self._say(str(next(self._beats)))
        self._read()
        now = time.monotonic()
        if now - self._answered > self.silence:
            return f"process 0 of {self._count} cannot be reached"
        for other, word in self._words.items():
            quiet = now - self._heard[other]
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
        self._answered = time.monotonic()
        for other, before in self._words.items():
            word = found.get(f"{FOLDER}/{other}", "")
            if word != before:
                self._words[other], self._heard[other] = word, self._answered


def end_process(code: int) -> NoReturn:
    """Ends this process now, without JAX's wait for the others to be done too."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
