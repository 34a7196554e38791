"""Steps all members of a sweep, logs, measures and saves each, and resumes them.

A sweep killed at any moment goes on from the newest step that all of its members hold
whole, and ends with the same bits. A member whose numbers are no longer finite is given
up; the others go on.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from prompt_tuning.checkpoints.run_store import checkpoint_files
from prompt_tuning.checkpoints.run_store.checkpoint_store import CheckpointStore
from prompt_tuning.core.atomic_files import replace_file
from prompt_tuning.core.errors import InputError, NotFiniteError
from prompt_tuning.sweep.sweep_batches import SweepBatch, stream_sweep
from prompt_tuning.sweep.sweep_run import Sweep, SweepMember
from prompt_tuning.sweep.sweep_step import States
from prompt_tuning.training.loop import (
    Recorder,
    resumed_message,
    save_due,
    state_at,
    stopped_message,
)
from prompt_tuning.training.metrics_log import MetricsLog
from prompt_tuning.training.progress import Reporter
from prompt_tuning.training.run_directory import IDENTITY_FILE, claim
from prompt_tuning.training.signals import StopDue, stop_signals

DIVERGED_FILE = "diverged.json"
SWEEP_FILE = "sweep.json"


@dataclasses.dataclass(frozen=True)
class SweepOutcome:
    """How a sweep ended.

    Attributes:
      step: steps done.
      finished: False if a signal stopped it early; the same command goes on.
      diverged: why each member that was given up was, by its name.
    """

    step: int
    finished: bool
    diverged: Mapping[str, str]


def train_sweep(
    sweep: Sweep,
    *,
    record: dict[str, Any] | None = None,
    make_reporter: Callable[[int], Reporter],
) -> SweepOutcome:
    """Runs to the end, or to SIGTERM or SIGINT, from wherever the directory is.

    Args:
      sweep: the prepared members.
      record: JSON that is kept beside each config, such as compiler flags.
      make_reporter: given the steps already done, shows progress.

    Raises:
      InputError: if a directory belongs to another run or sweep, or the members hold no
        whole checkpoint of one step.
    """
    _claim(sweep, record or {})
    # One more than a run keeps: a kill may fall between the saves of two members, and
    # what the others were saved at last must still be there.
    stores = [
        CheckpointStore(
            member.directory,
            sweep.run.keep_last + 1,
            sweep.run.keep_best,
            form=sweep.run.checkpoint_form,
        )
        for member in sweep.members
    ]
    messages: list[str] = []
    done, diverged = common_step(sweep.members, stores, messages.append)
    states = tuple(
        state_at(member.training, store, done)
        if done and member.name not in diverged
        else member.training.start
        for member, store in zip(sweep.members, stores, strict=True)
    )
    with contextlib.ExitStack() as entered:
        reporter = entered.enter_context(make_reporter(done))
        recorders = []
        for member, store in zip(sweep.members, stores, strict=True):
            log = MetricsLog(member.directory, done)
            entered.enter_context(contextlib.closing(log))
            entered.enter_context(contextlib.closing(store))
            recorders.append(Recorder(member.training, store, log))
        stopping = entered.enter_context(stop_signals())
        for message in messages:
            reporter.say(message)
        loop = _SweepLoop(sweep, recorders, reporter, stopping, diverged)
        return loop.run_from(states, done)


def _claim(sweep: Sweep, record: dict[str, Any]) -> None:
    """Takes the directories for this sweep, or checks that they are this sweep's."""
    names = [member.name for member in sweep.members]
    file = sweep.directory / SWEEP_FILE
    if (sweep.directory / IDENTITY_FILE).exists():
        raise InputError(
            f"{sweep.directory} belongs to a single run; choose another Run.directory"
        )
    if file.exists():
        known = list(json.loads(file.read_text())["members"])
        if known != names:
            raise InputError(
                f"{sweep.directory} belongs to a sweep with other members: found "
                f"{', '.join(known)}; this one has {', '.join(names)}. Choose another "
                "Run.directory"
            )
    frozen_model = sweep.members[0].training.fingerprint
    # Those that are there first: where one is refused, nothing has been made.
    for member in sorted(
        sweep.members,
        key=lambda member: not (member.directory / IDENTITY_FILE).exists(),
    ):
        claim(member.directory, member.config, frozen_model, record)
    if not file.exists():
        content = {
            "members": {m.name: {"varies": dict(m.varies)} for m in sweep.members}
        }
        replace_file(file, json.dumps(content, indent=1) + "\n")


def common_step(
    members: Sequence[SweepMember],
    stores: Sequence[CheckpointStore],
    say: Callable[[str], None],
) -> tuple[int, dict[str, str]]:
    """Where a sweep goes on, and which of its members were given up before.

    Args:
      members: of the sweep.
      stores: of each.
      say: told of damage that is passed over, and of where it goes on.

    Returns:
      the newest step that all hold whole, 0 if some hold none yet; and why members were
      given up at or before it, by name.

    Raises:
      InputError: if each holds checkpoints, but not of one step.
    """
    given_up = {m.name: read_diverged(m.directory) for m in members}
    lost = {name: found for name, found in given_up.items() if found is not None}
    while True:
        live = [
            (member, store)
            for member, store in zip(members, stores, strict=True)
            if member.name not in lost
        ]
        step = _newest_common(live, say) if live else max(s for s, _ in lost.values())
        again = [name for name, (at, _) in lost.items() if at > step]
        if not again:
            break
        for name in again:
            # It was given up after the step that all go back to.
            del lost[name]
    if step and len(lost) < len(members):
        say(resumed_message(step, members[0].training.run.steps))
    return step, {name: why for name, (_, why) in lost.items()}


def _newest_common(
    live: Sequence[tuple[SweepMember, CheckpointStore]], say: Callable[[str], None]
) -> int:
    held = [set(store.steps()) for _, store in live]
    for step in sorted(set.intersection(*held), reverse=True):
        try:
            for _, store in live:
                checkpoint_files.verify(store.folder / f"checkpoint_{step}")
        except InputError as problem:
            say(f"{problem}; step {step} is passed over")
        else:
            return step
    # A kill between the first saves leaves members without one, and others with one.
    if all(held) or max(map(len, held)) > 1:
        raise InputError(
            "the members hold no whole checkpoint of one step: "
            + "; ".join(
                f"{member.name} has {sorted(steps)}"
                for (member, _), steps in zip(live, held, strict=True)
            )
            + ". Go on with each alone (prompt-tuning train), or start the sweep "
            "in another directory"
        )
    if any(held):
        say("starting again: not every member holds a checkpoint")
    return 0


def read_diverged(directory: Path) -> tuple[int, str] | None:
    """At which step a member was given up and why, if it was."""
    file = directory / DIVERGED_FILE
    if not file.exists():
        return None
    found = json.loads(file.read_text())
    return found["step"], found["reason"]


class _SweepLoop:
    """The mutable middle of `train_sweep`."""

    def __init__(
        self,
        sweep: Sweep,
        recorders: Sequence[Recorder],
        reporter: Reporter,
        stopping: StopDue,
        diverged: Mapping[str, str],
    ):
        self._sweep, self._run = sweep, sweep.run
        self._recorders, self._reporter = recorders, reporter
        self._stopping, self._diverged = stopping, dict(diverged)
        self._live = [
            k for k, member in enumerate(sweep.members) if member.name not in diverged
        ]
        for k in self._live:
            # Where all went back to before it was given up.
            (sweep.members[k].directory / DIVERGED_FILE).unlink(missing_ok=True)

    def run_from(self, states: States, done: int) -> SweepOutcome:
        """Steps until the last step, a stop signal, or until no member is left."""
        last, pending, stop = self._run.steps, None, False
        trainings = [member.training for member in self._sweep.members]
        with contextlib.closing(stream_sweep(trainings, done)) as stream:
            batches: Iterator[SweepBatch] = stream
            for recorder in self._recorders:
                batches = recorder.meter.waiting(batches)
            while done < last and self._live and not stop:
                batch = next(batches)
                states, metrics = self._sweep.advance(states, batch.whole)
                done += 1
                # The step just sent off runs while the one before it is looked at.
                if pending is not None:
                    self._record(*pending)
                pending = (done, metrics, batch)
                stop = self._stopping(done)
                if save_due(self._run, done) or stop:
                    self._record(*pending)
                    pending = None
                    self._measure_and_save(done, states)
        for recorder in self._recorders:
            recorder.wait()
        if done < last and self._live:
            self._reporter.say(stopped_message(done, last))
        return SweepOutcome(done, done == last, self._diverged)

    def _record(self, step: int, metrics: Sequence[Any], batch: SweepBatch) -> None:
        found = jax.device_get(metrics)
        logged = {}
        for k in list(self._live):
            with self._giving_up(k, step):
                logged[k] = self._recorders[k].record(step, found[k], batch.members[k])
        shown = [line for line in logged.values() if line is not None]
        self._reporter.advance(step, _brief(shown) if shown else None)

    def _measure_and_save(self, done: int, states: States) -> None:
        measured = {}
        with contextlib.ExitStack() as stopped:
            for recorder in self._recorders:
                stopped.enter_context(recorder.meter.stopped())
                # None deletes its last but one while another's last is being written.
                recorder.wait()
            for k in list(self._live):
                with self._giving_up(k, done):
                    measured[k] = self._recorders[k].measure_and_save(done, states[k])
        if self._run.keep_best is None or not any(measured.values()):
            return
        metric, direction = self._run.keep_best
        choose = min if direction == "min" else max
        best = choose(measured, key=lambda k: measured[k][metric])
        values = [found[metric] for found in measured.values()]
        self._reporter.say(
            f"evaluation after step {done}: {metric} {min(values):.4f} to "
            f"{max(values):.4f}, best {self._sweep.members[best].name}"
        )

    @contextlib.contextmanager
    def _giving_up(self, k: int, step: int):
        """Lets go of member `k` where a number of it is not finite."""
        try:
            yield
        except NotFiniteError as problem:
            member = self._sweep.members[k]
            self._live.remove(k)
            self._diverged[member.name] = str(problem)
            content = {"step": step, "reason": str(problem)}
            replace_file(
                member.directory / DIVERGED_FILE, json.dumps(content, indent=1) + "\n"
            )
            self._reporter.say(f"{member.name} is given up: {problem}")


def _brief(logged: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What is shown of all members: the best, the middle, and their speed together."""
    losses = [line["loss"] for line in logged]
    return {
        "best_loss": min(losses),
        "median_loss": float(np.median(losses)),
        "tokens_per_second": sum(line["tokens_per_second"] for line in logged),
    }
