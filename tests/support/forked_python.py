"""Runs Python programs in forks of one process, which has imported the library.

    python -m tests.support.forked_python SOCKET
    python tests/support/forked_client.py SOCKET -m json  # as `python -m json`

Else each program would import JAX and the library, for seconds. JAX starts its threads
and devices after the fork.
"""

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import socket
import sys
import types
from pathlib import Path

import prompt_tuning


def main() -> None:
    """Runs programs in forks, until standard input ends."""
    for found in pkgutil.walk_packages(prompt_tuning.__path__, "prompt_tuning."):
        if not found.name.endswith("__main__"):
            with contextlib.suppress(ImportError):  # of a package that is not here
                importlib.import_module(found.name)
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(sys.argv[1])
        listener.listen(64)
        print("ready", flush=True)
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if not os.fork():
                break
            connection.close()
        else:
            return
    with connection:
        arguments = _start(connection)
    _run(arguments)


def _start(connection: socket.socket) -> list[str]:
    """Returns the arguments of a program in a fork with its files and environment.

    The process that calls this waits for the fork, and sends its number and exit code.
    """
    message, files, *_ = socket.recv_fds(connection, 1 << 20, 3)
    program = json.loads(message)
    fork = os.fork()
    if fork:
        for file in files:
            os.close(file)
        connection.send(str(fork).encode())
        code = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
        connection.send(str(code).encode())
        os._exit(0)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(program["folder"])
    before = _read_by_imports()
    os.environ.clear()
    os.environ.update(program["environment"])
    if _read_by_imports() != before:
        os.execv(sys.executable, [sys.executable, *program["arguments"]])
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        setattr(sys, name, os.fdopen(number, "w" if number else "r", 1, closefd=False))
    return program["arguments"]


def _read_by_imports() -> dict[str, str]:
    """Returns the variables of the environment that imports have read."""
    return {k: v for k, v in os.environ.items() if k.startswith(("JAX_", "PYTHON"))}


def _run(arguments: list[str]) -> None:
    """Runs what `python` with the arguments runs."""
    kind, *rest = arguments
    if kind == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(module))
    elif kind == "-m":
        sys.argv, sys.path[0] = rest, str(Path.cwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = arguments, str(Path(kind).resolve().parent)
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    main()
