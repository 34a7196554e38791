"""Processes that take turns, with questions and answers as lines of JSON over pipes.

The parent asks one worker at a time and waits for its answer, so two workers never
compute at the same time. This module has only light imports, so that it adds little to
a worker's memory.
"""

import contextlib
import dataclasses
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

Answer = dict[str, Any]
ROOT = Path(__file__).parents[2]

THREADS = 2
"""Threads of torch, as many as the cores of the published measurements."""

PAUSE = 0.01
"""Seconds between turns, in which the previous worker's threads stop spinning."""


class WorkerError(RuntimeError):
    """A worker exited without an answer."""


class Worker:
    """The parent's handle of a process that answers questions.

    Use it as a context manager: the process ends with the block.

    Attributes:
      name: name of the worker in error messages.
    """

    def __init__(self, name: str, command: Sequence[str]):
        self.name = name
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Ends the process; a second call does nothing."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def ask(self, question: str, **arguments: Any) -> Answer:
        """Sends a question and waits for the answer.

        Raises:
          WorkerError: if the process exited; the message has the end of its output.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        line = json.dumps({"question": question, **arguments})
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self._errors.seek(0)
            output = "".join(self._errors.readlines()[-15:])
            raise WorkerError(f"{self.name} exited at {question!r}:\n{output}")
        return json.loads(answer)


@dataclasses.dataclass(frozen=True)
class Turn:
    """Time and loss of one step of a worker."""

    seconds: float
    loss: float


Who = TypeVar("Who", bound=Hashable)


def take_turns(workers: Mapping[Who, Worker], rounds: int) -> dict[Who, list[Turn]]:
    """Runs rounds in which each worker does one step; returns each worker's steps."""
    turns: dict[Who, list[Turn]] = {who: [] for who in workers}
    for _ in range(rounds):
        for who, worker in workers.items():
            time.sleep(PAUSE)
            turns[who].append(Turn(**worker.ask("step")))
    return turns


def serve(answers: Mapping[str, Callable[..., Answer]]) -> None:
    """Answers questions in a worker until its standard input is closed.

    All other output goes to standard error, so that the pipe contains only answers.
    """
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        arguments = json.loads(line)
        answer = answers[arguments.pop("question")](**arguments)
        print(json.dumps(answer), file=pipe, flush=True)


def versions(*packages: ModuleType) -> Answer:
    """Returns the versions of packages."""
    return {"versions": {p.__name__: p.__version__ for p in packages}}


def peak_memory() -> Answer:
    """Returns this process's peak resident memory in bytes, including mapped files."""
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"bytes": kilobytes * 1024}
