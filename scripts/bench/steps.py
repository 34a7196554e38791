"""Runs cases: starts both sides, checks that their losses agree, and takes turns."""

import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.bench.cases import CASES, Case, make_prompt, make_rows
from scripts.bench.workers import ROOT, Turn, Worker, WorkerError, take_turns

OURS, PEFT = SIDES = ("ours", "peft")
AGREEMENT = 1e-3
CHECKED_STEPS = 3


class DisagreementError(RuntimeError):
    """The losses of the two sides differ, so their steps cannot be compared."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the measurement.

    Attributes:
      steps: measured turns of each side.
      warm_up: turns between the check of the losses and the measurement.
      ideal_rounds: timings of each product; 0 for no ideal time.
      devices: devices of the CPU that split the rows of our side's batches.
      peft_python: interpreter with torch and PEFT.
      say: function that prints progress.
    """

    steps: int = 20
    warm_up: int = 3
    ideal_rounds: int = 10
    devices: int = 1
    peft_python: str = sys.executable
    say: Callable[[str], None] = print


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    """Measurements of one case.

    Attributes:
      case: name in `CASES`.
      losses: losses of the first steps, by side.
      seconds: time of every step, by side, in the order of turns.
      peak_bytes: peak memory of each side's process, including weights.
      ideal: result of `ideal.time_products`, with the `traffic` of the step; None if
        it was not requested.
    """

    case: str
    losses: Mapping[str, Sequence[float]]
    seconds: Mapping[str, Sequence[float]]
    peak_bytes: Mapping[str, int]
    ideal: Mapping[str, Any] | None

    def median(self, side: str) -> float:
        """Returns the median seconds of a side's step."""
        return statistics.median(self.seconds[side])

    @property
    def speedup(self) -> float:
        """PEFT's step time divided by ours: the median over the turns."""
        return median_ratio(self.seconds[PEFT], self.seconds[OURS])

    @property
    def memory(self) -> float:
        """Our peak memory divided by PEFT's."""
        return self.peak_bytes[OURS] / self.peak_bytes[PEFT]

    @property
    def share(self) -> float | None:
        """Ideal time divided by the time of the steps between the products' timings."""
        if self.ideal is None:
            return None
        return (self.ideal["plain"] + self.ideal["batched"]) / self.ideal["step"]

    @property
    def attention_share(self) -> float | None:
        """Rate of the batched products in the step's layout, divided by torch's."""
        libraries = {} if self.ideal is None else self.ideal["libraries"]
        if "batched" not in libraries.get("torch", {}):
            return None
        step, torch = (libraries[name]["batched"] for name in ("step", "torch"))
        return torch["seconds"] / step["seconds"]


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Returns the median ratio of measurements of the same turn."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def run_cases(
    names: Sequence[str], folder: Path, settings: Settings
) -> tuple[list[StepResult], dict[str, str]]:
    """Measures cases of one model in one rotation, one step of each side and case.

    Args:
      names: names in `CASES`.
      folder: empty folder for the model and the batches.
      settings: settings of the measurement.

    Returns:
      the results, and the versions of the packages.

    Raises:
      DisagreementError: if the sides' first losses differ.
      WorkerError: if a side ends early.
    """
    settings.say(f"[bold]{', '.join(names)}[/]: writing a random model and batches")
    write_inputs({name: CASES[name] for name in names}, folder, settings.peft_python)
    with contextlib.ExitStack() as stack:
        workers = {
            (name, side): stack.enter_context(
                start_worker(name, side, folder, settings)
            )
            for name in names
            for side in SIDES
        }
        answers = [worker.ask("start") for worker in workers.values()]
        settings.say("  comparing the losses")
        losses = by_case(take_turns(workers, CHECKED_STEPS), "loss")
        for name in names:
            check_agreement(name, losses[name])
        take_turns(workers, settings.warm_up)
        settings.say(f"  {settings.steps} turns")
        seconds = by_case(take_turns(workers, settings.steps), "seconds")
        memory = {who: worker.ask("memory")["bytes"] for who, worker in workers.items()}
        for (_, side), worker in workers.items():
            if side == PEFT:
                worker.end()
        if settings.ideal_rounds:
            settings.say("  timing each matrix product alone")
        results = [
            StepResult(
                case=name,
                losses=losses[name],
                seconds=seconds[name],
                peak_bytes={side: memory[name, side] for side in SIDES},
                ideal=workers[name, OURS].ask(
                    "ideal",
                    rounds=settings.ideal_rounds,
                    torch_python=settings.peft_python,
                )
                if settings.ideal_rounds
                else None,
            )
            for name in names
        ]
    return results, {k: v for answer in answers for k, v in answer["versions"].items()}


def by_case(
    turns: Mapping[tuple[str, str], Sequence[Turn]], field: str
) -> dict[str, dict[str, list[float]]]:
    """Groups one number of every turn by case and side."""
    groups: dict[str, dict[str, list[float]]] = {}
    for (name, side), those in turns.items():
        groups.setdefault(name, {})[side] = [getattr(turn, field) for turn in those]
    return groups


def check_agreement(name: str, losses: Mapping[str, Sequence[float]]) -> None:
    """Checks that the sides' losses agree.

    Raises:
      DisagreementError: if the losses of a step differ by more than `AGREEMENT`.
    """
    for step, (ours, peft) in enumerate(
        zip(losses[OURS], losses[PEFT], strict=True), start=1
    ):
        if not abs(ours - peft) <= AGREEMENT * max(1.0, abs(peft)):
            raise DisagreementError(
                f"{name}: at step {step} our loss is {ours:.6f} and PEFT's {peft:.6f}; "
                f"they must agree to {AGREEMENT:g}, or the steps are not the same work"
            )


def write_inputs(cases: Mapping[str, Case], folder: Path, python: str) -> None:
    """Writes the model once, and each case's batch and initial prompt.

    Raises:
      WorkerError: if the model cannot be written.
    """
    first = next(iter(cases.values()))
    model = folder / "model"
    model.mkdir()
    described = {"family": first.family, "config": first.config}
    (folder / "model.json").write_text(json.dumps(described))
    _write_with_peft("make", folder, python)
    for name, case in cases.items():
        if (case.family, case.config) != (first.family, first.config):
            raise ValueError(f"{name} has another model than {next(iter(cases))}")
        inputs = folder / name
        inputs.mkdir()
        (inputs / "model").symlink_to(model.resolve())
        (inputs / "case.json").write_text(json.dumps(dataclasses.asdict(case)))
        rows = make_rows(case)
        np.savez(inputs / "rows.npz", tokens=rows.tokens, labels=rows.labels)
        np.save(inputs / "prompt.npy", make_prompt(case))
        if case.rank:
            _write_with_peft("adapt", inputs, python)


def _write_with_peft(action: str, folder: Path, python: str) -> None:
    completed = subprocess.run(
        [python, "-m", "scripts.bench.peft_step", action, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if completed.returncode:
        raise WorkerError(f"the model cannot be written:\n{completed.stderr[-2000:]}")


def start_worker(name: str, side: str, folder: Path, settings: Settings) -> Worker:
    """Starts one side of a case."""
    inputs = str(folder / name)
    if side == OURS:
        devices = str(settings.devices)
        command = [sys.executable, "-m", "scripts.bench.ours", inputs, devices]
    else:
        command = [
            settings.peft_python,
            "-m",
            "scripts.bench.peft_step",
            "serve",
            inputs,
        ]
    return Worker(f"{side} of {name}", command)
