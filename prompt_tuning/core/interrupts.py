"""Answers Ctrl-C immediately, and survives a closed output, e.g. of `| head`.

Python runs signal handlers between two instructions of the main thread, which may wait
many seconds for the compiler. So a thread reads the signal from the file descriptor
that Python's C handler writes to.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

INTERRUPTED = 130
"""Exit code that shells use for SIGINT."""
AGAIN = "press Ctrl-C again to stop at once"
SAME = 1.0
"""Seconds in which a further SIGINT is the same Ctrl-C: a program that starts another,
such as `timeout`, often sends it a second time."""
_SHOW_CURSOR = "\x1b[?25h"


@contextlib.contextmanager
def acknowledging(message: str, *, after: float = 0.0) -> Iterator[None]:
    """Acknowledges the first Ctrl-C within by a message, and ends at the second one.

    The first one's effect is up to its handler. The second one ends the process without
    cleanup, unless it comes within `SAME` seconds.

    Args:
      message: what happens after the first Ctrl-C.
      after: seconds until the message is printed; never, if the block ends before.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    previous = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    watcher = threading.Thread(
        target=_watch, args=(receiver, message, after), daemon=True
    )
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        os.close(sender)
        watcher.join()
        os.close(receiver)


class FirstOfSeveral:
    """Counts repeated signals of the same Ctrl-C once."""

    def __init__(self):
        self._first: float | None = None

    def is_new(self) -> bool:
        """Records a signal; returns False if it repeats an earlier one."""
        now = time.monotonic()
        if self._first is not None and now - self._first < SAME:
            return False
        self._first = now
        return True


def interrupt_once() -> Callable[..., None]:
    """Returns a SIGINT handler that raises `KeyboardInterrupt` once per Ctrl-C."""
    signals = FirstOfSeveral()

    def handle(*_: Any) -> None:
        if signals.is_new():
            raise KeyboardInterrupt

    return handle


def is_output_closed() -> bool:
    """Tests whether standard output is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _watch(receiver: int, message: str, after: float) -> None:
    """Reads signal numbers until the other end is closed."""
    count, signals = 0, FirstOfSeveral()
    while numbers := os.read(receiver, 64):
        count += signal.SIGINT in numbers and signals.is_new()
        if count > 1:
            _end()
        # Readable if another signal came, or if the block has ended.
        if count and message and not select.select([receiver], [], [], after)[0]:
            print(f"{message}; {AGAIN}", file=sys.stderr, flush=True)
            message = ""


def _end() -> None:
    """Ends the process; a progress bar may have hidden the cursor."""
    if sys.__stderr__ is not None and sys.__stderr__.isatty():
        sys.__stderr__.write(f"{_SHOW_CURSOR}\n")
        sys.__stderr__.flush()
    os._exit(INTERRUPTED)
