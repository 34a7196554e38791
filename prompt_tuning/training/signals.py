"""Signals that ask a run to stop where it can go on later."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

from prompt_tuning import processes

StopDue = Callable[[int], bool]
"""Given the steps done, whether to stop now. Ask after every step."""


@contextlib.contextmanager
def stop_signals() -> Iterator[StopDue]:
    """While entered, SIGTERM and SIGINT ask to stop in place of ending the process.

    Of several processes all stop after the same step, whichever of them got the signal.
    """
    if processes.count() > 1:
        with _on_signals([signal.SIGINT], _pass_on):
            yield _agreed
        return
    event = threading.Event()
    with _on_signals([signal.SIGTERM, signal.SIGINT], event.set):
        yield lambda _: event.is_set()


@contextlib.contextmanager
def _on_signals(numbers: list[signal.Signals], act: Callable[[], None]):
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [signal.signal(number, lambda *_: act()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _pass_on() -> None:
    """Makes of SIGINT what JAX's runtime listens for."""
    signal.raise_signal(signal.SIGTERM)


def _agreed(step: int) -> bool:
    """Whether all processes stop after this step.

    JAX's runtime handles SIGTERM since the processes joined: threads of its own tell
    all processes of it and settle on the step after the furthest that one has come to.
    Asking costs a look at what they settled on, and nothing is sent between devices.
    """
    from jax.experimental import multihost_utils

    return multihost_utils.reached_preemption_sync_point(step)
