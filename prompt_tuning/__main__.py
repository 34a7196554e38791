"""`python -m prompt_tuning`, the same as the command `prompt-tuning`."""

import os
import signal
import sys
from typing import Any

from prompt_tuning.core.interrupts import (
    INTERRUPTED,
    acknowledging,
    interrupt_once,
    is_output_closed,
)

OUTPUT_CLOSED = 1
"""Exit code if nothing reads the output any more."""
PATIENCE = 0.5
"""Seconds that a command has to stop before Ctrl-C is acknowledged."""


def main() -> int:
    """Runs the command; Ctrl-C ends it with one line, even during imports.

    It ends without any line if what reads its output ends first, as `head` does.
    """
    sys.unraisablehook = _report_unraisable
    # A shell starts commands in the background with this signal ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt_once())
    try:
        with acknowledging("prompt-tuning: stopping", after=PATIENCE):
            from prompt_tuning.cli.main import main as run_command

            try:
                return run_command()
            finally:
                # Otherwise Python does it at its end, and prints the error.
                print(end="", flush=True)
    except BrokenPipeError:
        if not is_output_closed():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OUTPUT_CLOSED
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _report_interrupt()
        return INTERRUPTED


def _report_interrupt() -> None:
    print("prompt-tuning: interrupted", file=sys.stderr, flush=True)


def _report_unraisable(unraisable: Any) -> None:
    """Ends the process if Ctrl-C met a callback, which cannot raise it."""
    if unraisable.exc_type is KeyboardInterrupt:
        _report_interrupt()
        os._exit(INTERRUPTED)
    sys.__unraisablehook__(unraisable)


if __name__ == "__main__":
    sys.exit(main())
