"""Ctrl-C while the main thread is in code that does not return to Python."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import prompt_tuning
from prompt_tuning.core.interrupts import INTERRUPTED, SAME, interrupt_once

ROOT = Path(prompt_tuning.__file__).parents[1]
BUSY = """
import hashlib, signal
from prompt_tuning.core.interrupts import acknowledging

signal.signal(signal.SIGINT, lambda *_: None)
with acknowledging("stopping after this step"):
    print("busy", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000_000)
"""


def test_the_first_is_acknowledged_at_once_and_the_second_ends_the_process():
    # The computation would take many minutes, and no handler can run before its end.
    with subprocess.Popen(
        [sys.executable, "-c", BUSY],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            assert process.stdout.readline() == "busy\n"
            os.kill(process.pid, signal.SIGINT)
            os.kill(process.pid, signal.SIGINT)
            message = process.stderr.readline()
            assert message == (
                "stopping after this step; press Ctrl-C again to stop at once\n"
            )
            # Wrappers such as `timeout` send it twice: this is the same Ctrl-C.
            os.kill(process.pid, signal.SIGINT)
            time.sleep(SAME)
            assert process.poll() is None
            os.kill(process.pid, signal.SIGINT)
            assert process.wait(timeout=60) == INTERRUPTED
        finally:
            process.kill()


def test_a_repeated_signal_interrupts_once():
    """A second one would meet the cleanup after the first."""
    handle = interrupt_once()
    with pytest.raises(KeyboardInterrupt):
        handle(signal.SIGINT, None)
    handle(signal.SIGINT, None)
