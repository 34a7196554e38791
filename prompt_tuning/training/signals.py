"""Signals that stop a run at a point from which it can be resumed."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

from prompt_tuning import processes
from prompt_tuning.core.interrupts import acknowledging

StopDue = Callable[[int], bool]
"""Whether to stop now, given the number of steps done; call it after every step."""


@contextlib.contextmanager
def stop_signals() -> Iterator[StopDue]:
    """Makes SIGTERM and SIGINT request a stop instead of ending the process.

    A second SIGINT ends it at once.

    Several processes all stop after the same step, whichever of them got the signal.
    """
    if processes.count() > 1:
        with _on_signals([signal.SIGINT], _pass_on):
            yield _agreed
        return
    event = threading.Event()
    with (
        _on_signals([signal.SIGTERM, signal.SIGINT], event.set),
        acknowledging("stopping after this step"),
    ):
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
    """Passes SIGINT on as SIGTERM, which JAX's runtime handles."""
    signal.raise_signal(signal.SIGTERM)


def _agreed(step: int) -> bool:
    """Whether all processes stop after this step.

    JAX's runtime has handled SIGTERM since the processes joined: its own threads notify
    all processes and agree on the step after the furthest that any process has reached.
    This function only reads what they agreed on; nothing is sent between devices.
    """
    from jax.experimental import multihost_utils

    return multihost_utils.reached_preemption_sync_point(step)
