"""Functions in another process: their errors, their crashes, and their limits."""

import os
import signal
from pathlib import Path

import pytest

from prompt_tuning.core.errors import InputError, StorageError
from prompt_tuning.core.limited_process import MAXIMUM_MEMORY, run_limited


def copy(source: Path, target: Path) -> None:
    target.write_bytes(source.read_bytes())


def refuse(source: Path, target: Path) -> None:
    raise InputError(f"{source} is é")


def fail(source: Path, target: Path) -> None:
    raise StorageError(f"{target} is full")


def crash(source: Path, target: Path) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def allocate(source: Path, target: Path) -> None:
    bytearray(MAXIMUM_MEMORY + 2**20)


def loop(source: Path, target: Path) -> None:
    while True:
        pass


def test_the_function_is_called_with_the_paths(tmp_path):
    (tmp_path / "a").write_text("text")
    run_limited(copy, tmp_path / "a", tmp_path / "b", seconds=9, problem="x")
    assert (tmp_path / "b").read_text() == "text"


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (refuse, InputError, "^one is é$"),
        (fail, StorageError, "^two is full$"),
        (crash, InputError, "^no copy: the process ended with -11$"),
        (allocate, InputError, "^no copy: the process ended with 1$"),
        (loop, InputError, "^no copy: this takes more than 1 s of computing$"),
    ],
)
def test_errors_crashes_and_limits_become_messages(function, error, message):
    with pytest.raises(error, match=message):
        run_limited(function, Path("one"), Path("two"), seconds=1, problem="no copy")
