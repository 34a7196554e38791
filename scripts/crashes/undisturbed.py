"""Commands that nothing disturbs."""

import shutil
import time
from pathlib import Path

from scripts.crashes.processes import (
    Contents,
    RunningClock,
    contents,
    output,
    start,
    wait,
)
from scripts.crashes.scenarios import Scenario


def padded(name: str) -> str:
    """Returns a name of a constant length: gin breaks lines by the length of paths."""
    return name.ljust(30, "_")


def run_undisturbed(folder: Path, scenario: Scenario) -> tuple[Contents, float]:
    """Returns a command's output files and its seconds."""
    target = folder / padded(f"undisturbed_{scenario.name.replace(' ', '_')}")
    seconds = float("inf")
    for _ in range(2):  # the second start reads the compilation cache
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        started = time.monotonic()
        if problems := finish(target, scenario):
            raise RuntimeError(f"{scenario.name} fails: {problems}")
        seconds = min(seconds, time.monotonic() - started)
    print(f"{scenario.name}: {seconds:.1f} s", flush=True)
    return contents(target), seconds


def finish(target: Path, scenario: Scenario) -> list[str]:
    """Runs a command to its end; returns what it printed if it failed."""
    processes = start(target, scenario.commands(target))
    clock = RunningClock()
    codes = [wait(process, clock) for process in processes]
    return [
        f"exit code {code}: {output(target, number).read_text()}"
        for number, code in enumerate(codes)
        if code
    ]
