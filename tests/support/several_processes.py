"""Starts a command as several processes on this machine, each with CPU devices."""

import dataclasses
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support.small_runs import COMPILATION_CACHE

LIMIT = 120.0
"""Seconds, many times what a start takes on an idle machine."""

SILENCE = 8
"""Seconds after which the processes of a test take another for dead."""


@dataclasses.dataclass
class Started:
    """Processes that run; each writes what it prints into files."""

    processes: list[subprocess.Popen]
    folder: Path

    def codes(self) -> list[int]:
        """Their exit codes, once all have ended."""
        until = time.monotonic() + LIMIT
        return [p.wait(max(until - time.monotonic(), 0.1)) for p in self.processes]

    def printed(self, number: int) -> str:
        """What a process wrote to its standard output."""
        return (self.folder / f"{number}.out").read_text()

    def said(self, number: int) -> str:
        """What a process wrote to its standard error."""
        return (self.folder / f"{number}.err").read_text()

    def last_said(self, number: int) -> str:
        """The last line of it; what speaks for an aborted process may come after it."""
        until = time.monotonic() + 10
        while time.monotonic() < until:
            lines = self.said(number).splitlines()
            if lines and lines[-1].startswith("prompt-tuning"):
                return lines[-1]
            time.sleep(0.05)
        return self.said(number)

    def wait_for(self, happened: Callable[[], bool]) -> None:
        """Waits until something has happened, while all processes live."""
        until = time.monotonic() + LIMIT
        while not happened():
            ended = [p.poll() for p in self.processes]
            assert ended == [None] * len(ended), (ended, self.said(0), self.said(1))
            assert time.monotonic() < until, (self.printed(0), self.said(0))
            time.sleep(0.05)

    def succeeded(self) -> "Started":
        """The same, once all have ended well."""
        codes = self.codes()
        assert codes == [0] * len(codes), [self.said(n) for n in range(len(codes))]
        return self

    def end(self) -> None:
        """Ends those that are left."""
        for process in self.processes:
            process.kill()
            process.wait()


def free_port() -> int:
    """One that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def slurm_task(number: int, count: int, job: int) -> dict[str, str]:
    """Of what SLURM tells a task, what JAX reads."""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(count),
        "SLURM_PROCID": str(number),
        "SLURM_LOCALID": str(number),
    }


def start(
    folder: Path,
    commands: Sequence[Sequence[str]],
    devices: int,
    places: Sequence[Path] | None = None,
    slurm: bool = False,
) -> Started:
    """Starts one process for each command; a single one is started by itself.

    Args:
      folder: for what they print.
      commands: arguments of `prompt-tuning`.
      devices: of each process.
      places: the working directory of each; None for this process's.
      slurm: whether they find each other by what SLURM tells its tasks.
    """
    folder.mkdir(parents=True)
    environment = os.environ | COMPILATION_CACHE
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    address = f"--coordinator=127.0.0.1:{free_port()}"
    count, processes, job = len(commands), [], free_port()
    for number, command in enumerate(commands):
        joined = [address, f"--processes={count}", f"--process={number}"]
        if slurm:
            environment |= slurm_task(number, count, job)
            joined = ["--distributed"]
        joined = [*joined, f"--silence={SILENCE}"] if count > 1 else []
        with (
            (folder / f"{number}.out").open("w") as printed,
            (folder / f"{number}.err").open("w") as said,
        ):
            process = subprocess.Popen(
                [sys.executable, "-m", "prompt_tuning", *command, *joined],
                cwd=None if places is None else places[number],
                env=environment,
                stdout=printed,
                stderr=said,
            )
        processes.append(process)
    return Started(processes, folder)
