"""Stop a run after a signal, at a step from which it can resume."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

from prompt_tuning import processes
from prompt_tuning.core.interrupts import acknowledging


class StopSignals:
    """The signals that requested a stop.

    Attributes:
      interrupted: whether SIGINT is among them.
    """

    def __init__(self):
        self.interrupted = False
        self._received = threading.Event()

    def due(self, step: int) -> bool:
        """Whether to stop now; call it after every step."""
        if processes.count() > 1:
            return _agreed(step)
        return self._received.is_set()

    def receive(self, number: int) -> None:
        """Handles a signal."""
        self.interrupted |= number == signal.SIGINT
        if processes.count() > 1:
            # JAX's runtime handles SIGTERM.
            signal.raise_signal(signal.SIGTERM)
        else:
            self._received.set()


@contextlib.contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Lets SIGTERM and SIGINT request a stop instead of ending the process.

    A second SIGINT ends it immediately. With several processes, all stop after the same
    step, whichever of them got the signal.
    """
    signals = StopSignals()
    if processes.count() > 1:
        with _on_signals([signal.SIGINT], signals.receive):
            yield signals
        return
    with (
        _on_signals([signal.SIGTERM, signal.SIGINT], signals.receive),
        acknowledging("stopping after this step"),
    ):
        yield signals


@contextlib.contextmanager
def _on_signals(numbers: list[signal.Signals], act: Callable[[int], None]):
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old_handlers = [signal.signal(number, lambda n, _: act(n)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, old_handlers, strict=True):
            signal.signal(number, handler)


def _agreed(step: int) -> bool:
    """Whether all processes stop after this step.

    JAX's runtime has handled SIGTERM since the processes joined: its own threads notify
    all processes and agree on the step after the furthest one that any process has
    reached. This function only reads their decision; devices exchange nothing.
    """
    from jax.experimental import multihost_utils

    return multihost_utils.reached_preemption_sync_point(step)
