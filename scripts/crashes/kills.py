"""Kills commands at random times and compares the files at the end."""

import dataclasses
import itertools
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from scripts.crashes.processes import contents, differences, phase_of, start
from scripts.crashes.scenarios import Scenario
from scripts.crashes.undisturbed import finish, padded, run_undisturbed

MOST_KILLS = 5
"""Maximum number of kills in one trial."""


@dataclasses.dataclass
class Row:
    """Results of one scenario."""

    trials: int = 0
    kills: int = 0
    differing: int = 0
    phases: Counter[str] = dataclasses.field(default_factory=Counter)


def run_kills(
    folder: Path, scenarios: Sequence[Scenario], kills: int, randomness: random.Random
) -> bool:
    """Kills commands until the number is reached; returns whether anything differs."""
    expected = {x.name: run_undisturbed(folder, x) for x in scenarios}
    rows = {scenario.name: Row() for scenario in scenarios}
    began = time.monotonic()
    # The same time for each, so that faster commands are killed more often.
    weights = [1 / expected[scenario.name][1] for scenario in scenarios]
    for trial in itertools.count(1):
        (scenario,) = randomness.choices(scenarios, weights)
        row, target = rows[scenario.name], folder / padded(f"trial_{trial}")
        contents_expected, seconds = expected[scenario.name]
        target.mkdir()
        row.trials += 1
        problems = []
        for _ in range(randomness.randint(1, MOST_KILLS)):
            delay = randomness.uniform(0.05, 1.05) * seconds
            killed = kill(target, scenario, delay, randomness)
            row.kills += killed
            if not killed:
                break  # it ended before the kill
            row.phases[phase_of(target)] += 1
        else:
            problems = finish(target, scenario)
        problems += differences(contents_expected, contents(target))
        if scenario.refuses_again and "already; --force" in "".join(problems[:1]):
            problems = problems[1:]  # killed after everything was done
        if problems:
            row.differing += 1
            print(f"DIFFERS {scenario.name} {target}: {problems}", flush=True)
        else:
            shutil.rmtree(target)
        done = sum(row.kills for row in rows.values())
        if trial % 10 == 0:
            minutes = (time.monotonic() - began) / 60
            print(f"{done} kills in {minutes:.1f} min", flush=True)
        if done >= kills:
            break
    print("\n| scenario | trials | kills | trials with differing bits |")
    print("|---|---|---|---|")
    for name, row in rows.items():
        print(f"| {name} | {row.trials} | {row.kills} | {row.differing} |")
    for name, row in rows.items():
        counts = ", ".join(f"{n} in {phase}" for phase, n in row.phases.most_common())
        print(f"{name} was killed: {counts}")
    return any(row.differing for row in rows.values())


def kill(
    target: Path, scenario: Scenario, delay: float, randomness: random.Random
) -> int:
    """Starts a command and kills its processes; returns how many had not ended."""
    processes = start(target, scenario.commands(target))
    time.sleep(delay)
    order = randomness.sample(processes, len(processes))
    killed = 0
    for number, process in enumerate(order):
        if number:
            time.sleep(randomness.choice((0.0, randomness.uniform(0.0, 0.3))))
        os.kill(process, signal.SIGKILL)
    for process in order:
        _, status = os.waitpid(process, 0)
        killed += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return killed
