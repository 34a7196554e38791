"""Processes that take turns: questions and answers as lines of JSON over pipes.

The parent asks one worker at a time and waits for its answer, so no two of them ever
compute together. This module imports nothing heavy: what a worker weighs is its own.
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
from typing import Any, TypeVar

Answer = dict[str, Any]
ROOT = Path(__file__).parents[2]

PAUSE = 0.01
"""Seconds between turns, in which the threads of the last worker stop to spin."""


class WorkerError(RuntimeError):
    """A worker ended without an answer."""


class Worker:
    """A process that answers questions, seen from its parent.

    Use it as a context manager: the process ends with the block.

    Attributes:
      name: what results are filed under.
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
        """Ends the process; does nothing the second time."""
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
        """Asks and waits.

        Raises:
          WorkerError: if the process ended, with the last that it said.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        line = json.dumps({"question": question, **arguments})
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self._errors.seek(0)
            said = "".join(self._errors.readlines()[-15:])
            raise WorkerError(f"{self.name} ended at {question!r}:\n{said}")
        return json.loads(answer)


@dataclasses.dataclass(frozen=True)
class Turn:
    """One step of one worker: its seconds and its loss."""

    seconds: float
    loss: float


Who = TypeVar("Who", bound=Hashable)


def take_turns(workers: Mapping[Who, Worker], rounds: int) -> dict[Who, list[Turn]]:
    """Lets each worker do one step, over and over; gives each one's steps."""
    turns: dict[Who, list[Turn]] = {who: [] for who in workers}
    for _ in range(rounds):
        for who, worker in workers.items():
            time.sleep(PAUSE)
            turns[who].append(Turn(**worker.ask("step")))
    return turns


def serve(answers: Mapping[str, Callable[..., Answer]]) -> None:
    """Answers questions until the pipe closes; the worker's side.

    Whatever else is printed goes to standard error, so that the pipe holds answers.
    """
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        arguments = json.loads(line)
        answer = answers[arguments.pop("question")](**arguments)
        print(json.dumps(answer), file=pipe, flush=True)


def peak_memory() -> Answer:
    """The most bytes that this process ever had in memory, mapped files included."""
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"bytes": kilobytes * 1024}
