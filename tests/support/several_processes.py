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
"""Timeout in seconds; a start on an idle machine takes a small fraction of it."""

SILENCE = 8
"""Seconds after which the processes of a test consider another one dead."""


@dataclasses.dataclass
class Started:
    """Running processes; each writes its output to files."""

    processes: list[subprocess.Popen]
    folder: Path

    def codes(self) -> list[int]:
        """Waits for all processes; returns their exit codes."""
        until = time.monotonic() + LIMIT
        return [p.wait(max(until - time.monotonic(), 0.1)) for p in self.processes]

    def printed(self, number: int) -> str:
        """Returns the standard output of a process."""
        return (self.folder / f"{number}.out").read_text()

    def errors(self, number: int) -> str:
        """Returns the standard error of a process."""
        return (self.folder / f"{number}.err").read_text()

    def last_said(self, number: int) -> str:
        """Waits until the last line is a message of the command; returns that line."""
        until = time.monotonic() + 10
        while time.monotonic() < until:
            lines = self.errors(number).splitlines()
            if lines and lines[-1].startswith("prompt-tuning"):
                return lines[-1]
            time.sleep(0.05)
        return self.errors(number)

    def wait_for(self, happened: Callable[[], bool]) -> None:
        """Waits until a condition holds, while all processes are running."""
        until = time.monotonic() + LIMIT
        while not happened():
            ended = [p.poll() for p in self.processes]
            assert ended == [None] * len(ended), (ended, self.errors(0), self.errors(1))
            assert time.monotonic() < until, (self.printed(0), self.errors(0))
            time.sleep(0.05)

    def succeeded(self) -> "Started":
        """Waits for all processes to succeed; returns the same."""
        codes = self.codes()
        assert codes == [0] * len(codes), [self.errors(n) for n in range(len(codes))]
        return self

    def end(self) -> None:
        """Kills the processes that are still running."""
        for process in self.processes:
            process.kill()
            process.wait()


def free_port() -> int:
    """Returns a free port."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def slurm_task(number: int, count: int, job: int) -> dict[str, str]:
    """Returns the environment variables of a SLURM task that JAX reads."""
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
    directories: Sequence[Path] | None = None,
    slurm: bool = False,
    module: str = "prompt_tuning",
) -> Started:
    """Starts one process per command; a single one is started without a group.

    Args:
      folder: folder for the processes' output.
      commands: arguments of `prompt-tuning` for each process.
      devices: number of devices of each process.
      directories: working directory of each process; None for this process's.
      slurm: whether the processes find each other through SLURM's variables.
      module: module that each process runs.
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
            (folder / f"{number}.err").open("w") as errors,
        ):
            process = subprocess.Popen(
                [sys.executable, "-m", module, *command, *joined],
                cwd=None if directories is None else directories[number],
                env=environment,
                stdout=printed,
                stderr=errors,
            )
        processes.append(process)
    return Started(processes, folder)
