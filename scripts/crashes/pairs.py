"""Starts pairs of commands that write one run directory."""

import os
import random
import signal
import time
from pathlib import Path

from scripts.crashes.processes import LONGEST, RunningClock, output, start, wait
from scripts.crashes.scenarios import run_options


def run_pairs(folder: Path, pairs: int, randomness: random.Random) -> bool:
    """Starts pairs of commands in one run directory; returns whether any failed."""
    failures = 0
    for number in range(pairs):
        target = folder / f"pair_{number}"
        run = target / "run"
        target.mkdir()
        bindings = run_options(folder, run, steps=10**6)
        train = ["train", *bindings, "--gin.Run.save_every=100"]
        sweep = ["sweep", *train[1:], "--vary", "Run.seed=0,1"]
        member = ["train", *run_options(folder, run / "seed=0", steps=10**6)]
        kinds = [(train, train), (sweep, sweep), (train, sweep), (sweep, member)]
        commands = list(kinds[number % len(kinds)])
        randomness.shuffle(commands)
        stagger = randomness.choice((0.0, randomness.uniform(0, 1)))
        problem = run_pair(target, commands, stagger)
        names = " and ".join(command[0] for command in commands)
        print(f"pair {number + 1}, {names}, {stagger:.2f} s apart: {problem or 'one'}")
        failures += bool(problem)
    print(f"{pairs} pairs, in {pairs - failures} exactly one continued", flush=True)
    return bool(failures)


def run_pair(target: Path, commands: list[list[str]], stagger: float) -> str:
    """Runs a pair; returns a description of the problem, or an empty text."""
    (target / "0").mkdir()
    (target / "1").mkdir()
    processes = start(target / "0", commands[:1])
    time.sleep(stagger)
    processes += start(target / "1", commands[1:])
    clock = RunningClock()
    codes: list[int | None] = [None, None]
    while codes == [None, None] and clock.seconds < LONGEST:
        for number, process in enumerate(processes):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                codes[number] = os.waitstatus_to_exitcode(status)
        clock.sleep()
    time.sleep(1)
    (refused,) = [n for n in (0, 1) if codes[n] is not None] or (0,)
    printed = output(target / str(refused), 0).read_text()
    other = processes[1 - refused]
    wait_for = target.rglob("checkpoint_*")
    while not any(wait_for) and clock.seconds < LONGEST:
        clock.sleep()
        wait_for = target.rglob("checkpoint_*")
    os.kill(other, signal.SIGTERM)
    codes[1 - refused] = wait(other, clock)
    one_line = len(printed.splitlines()) == 1 and "is being written by" in printed
    if sorted(codes) == [0, 2] and one_line and codes[refused] == 2:  # type: ignore
        return ""
    return f"exit codes {codes}, and the refused one printed: {printed}"
