"""Runs functions in another Python process, with limits on time and memory.

A C library that reads a damaged file may crash or never return. In a limited process
both become an error message.
"""

import contextlib
import importlib
import json
import math
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from prompt_tuning.core.errors import InputError, StorageError

MAXIMUM_MEMORY = 2**30
"""Bytes that the function may allocate."""

_CODES = {InputError: 2, StorageError: 1}
"""Exit codes of a function that raises an error, whose message it prints."""


def python_command(statements: str, *arguments: str) -> list[str]:
    """Returns a command that runs statements in a Python with the same modules.

    Neither environment variables nor the working directory add modules to it.
    """
    path = "import json, sys\nsys.path[:] = json.loads(sys.argv.pop(1))\n"
    return [
        *(sys.executable, "-I", "-c", path + statements),
        *(json.dumps(sys.path), *arguments),
    ]


def run_limited(
    function: Callable[[Path, Path], None],
    source: Path,
    target: Path,
    *,
    seconds: int,
    problem: str,
) -> None:
    """Calls a function of a module with two paths in another process.

    Args:
      function: function at the top level of its module; must not print.
      source: its first argument.
      target: its second argument.
      seconds: CPU time that it may take.
      problem: what cannot be done if it fails, for the message.

    Raises:
      InputError: if the function raises it, crashes, or exceeds a limit.
      StorageError: if the function raises it.
    """
    command = python_command(
        f"from {__name__} import serve\nserve()",
        *(function.__module__, function.__name__, str(source), str(target)),
        str(seconds),
    )
    ended = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    for error, code in _CODES.items():
        if ended.returncode == code and ended.stdout:
            raise error(ended.stdout.decode(errors="replace"))
    if ended.returncode == -signal.SIGXCPU:
        raise InputError(f"{problem}: this takes more than {seconds} s of computing")
    if ended.returncode:
        raise InputError(f"{problem}: the process ended with {ended.returncode}")


def serve() -> None:
    """Calls the function named by this process's arguments."""
    module, name, source, target, seconds = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    function = getattr(importlib.import_module(module), name)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    end = math.ceil(time.process_time()) + int(seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (end, end + 1))
    _limit_memory()
    try:
        function(Path(source), Path(target))
    except tuple(_CODES) as error:
        sys.stdout.write(str(error))
        sys.stdout.flush()
        sys.exit(_CODES[type(error)])


def _limit_memory() -> None:
    # Other systems have no such file, or no such limit; a lower one may be set.
    with contextlib.suppress(ValueError, OSError):
        pages = int(Path("/proc/self/statm").read_bytes().split()[0])
        limit = pages * resource.getpagesize() + MAXIMUM_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
