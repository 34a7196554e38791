"""Signals that ask a run to stop where it can go on later."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """While entered, SIGTERM and SIGINT set an event in place of ending the process."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: event.set()) for number in numbers]
    try:
        yield event
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
