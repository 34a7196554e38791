"""`python -m prompt_tuning`, the same as the command `prompt-tuning`."""

import os
import signal
import sys
from typing import Any

from prompt_tuning.core.interrupts import INTERRUPTED, acknowledging

PATIENCE = 0.5
"""Seconds that a command has to stop before Ctrl-C is acknowledged."""


def main() -> int:
    """Runs the command; Ctrl-C ends it with one line, even during imports."""
    sys.unraisablehook = _report_unraisable
    try:
        with acknowledging("prompt-tuning: stopping", after=PATIENCE):
            from prompt_tuning.cli.main import main as run_command

            return run_command()
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
