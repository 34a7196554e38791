"""The loop of a sweep: steps all members together, logs, evaluates and saves each.

A sweep that is killed at any moment resumes from the newest step of which all members
have an intact checkpoint, and ends with the same bits. A member whose loss or
parameters are no longer finite is dropped; the others continue.
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
from prompt_tuning.checkpoints.run_store.kept_prompts import KeptPrompts
from prompt_tuning.config.config_changes import ConfigChanges
from prompt_tuning.config.config_values import IDENTITY_FILE
from prompt_tuning.core.activity import displayed_by
from prompt_tuning.core.atomic_files import replace_file
from prompt_tuning.core.errors import InputError, NotFiniteError, shown
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.core.typed_json import read_object
from prompt_tuning.sweep.sweep_batches import SweepBatch, stream_sweep
from prompt_tuning.sweep.sweep_run import Sweep, SweepMember
from prompt_tuning.training.continuation import (
    adopt_changes,
    resumed_message,
    state_at,
)
from prompt_tuning.training.data_record import data_record
from prompt_tuning.training.loop import stopped_message
from prompt_tuning.training.metrics_log import MetricsLog
from prompt_tuning.training.progress import Reporter
from prompt_tuning.training.recorder import Recorder, save_due
from prompt_tuning.training.run_directory import check_steps, claim, model_record
from prompt_tuning.training.signals import StopSignals, stop_signals
from prompt_tuning.training.state import TrainState

DIVERGED_FILE = "diverged.json"
SWEEP_FILE = "sweep.json"


@dataclasses.dataclass(frozen=True)
class SweepOutcome:
    """How a sweep ended.

    Attributes:
      step: number of steps done.
      finished: False if a signal stopped it early; the same command resumes it.
      diverged: reason for each dropped member, by the member's name.
      interrupted: whether Ctrl-C stopped it.
    """

    step: int
    finished: bool
    diverged: Mapping[str, str]
    interrupted: bool = False


def train_sweep(
    sweep: Sweep,
    *,
    record: dict[str, Any] | None = None,
    make_reporter: Callable[[int], Reporter],
) -> SweepOutcome:
    """Starts or resumes a sweep, and runs it to the end or until SIGTERM or SIGINT.

    The caller holds the directories (see `hold_run`).

    Args:
      sweep: the prepared members.
      record: JSON that is stored with each config, such as compiler flags.
      make_reporter: returns a progress reporter, given the number of steps already
        done.

    Raises:
      InputError: if a directory belongs to another run or sweep, or the members have no
        intact checkpoint of the same step.
    """
    changes = _claim(sweep, record or {})
    # One more than a run keeps: a kill may come between the saves of two members, and
    # the previous checkpoint of the one saved first must still exist.
    stores = [
        CheckpointStore(
            member.directory,
            sweep.run.keep_last + 1,
            sweep.run.best_by,
            form=sweep.run.checkpoint_form,
            kept_prompts=KeptPrompts(sweep.run.keep_prompts, sweep.run.save_paths),
        )
        for member in sweep.members
    ]
    messages: list[str] = []
    done, diverged = common_step(sweep.members, stores, messages.append)
    check_steps(sweep.directory, done, sweep.run.steps)
    if done:
        for store in stores:
            store.finish_deletion(done)
    states = tuple(
        state_at(member.training, store, done)
        if done and member.name not in diverged
        else member.training.start
        for member, store in zip(sweep.members, stores, strict=True)
    )
    with contextlib.ExitStack() as resources:
        reporter = resources.enter_context(make_reporter(done))
        resources.enter_context(displayed_by(reporter.doing))
        recorders = []
        for member, store in zip(sweep.members, stores, strict=True):
            log = MetricsLog(member.directory, done)
            resources.enter_context(contextlib.closing(log))
            resources.enter_context(contextlib.closing(store))
            recorders.append(Recorder(member.training, store, log))
            recorders[-1].keep_frozen()
        stopping = resources.enter_context(stop_signals())
        for message in messages:
            reporter.say(message)
        for member, store, recorder in zip(
            sweep.members, stores, recorders, strict=True
        ):
            change, config = changes[member.name], member.config
            adopt_changes(member.training, store, change, config, recorder, reporter)
        loop = _SweepLoop(sweep, recorders, reporter, stopping, diverged)
        return loop.run_from(states, done)


def _claim(sweep: Sweep, record: dict[str, Any]) -> dict[str, ConfigChanges]:
    """Claims the directories, or checks that they belong to this sweep.

    Returns:
      what differs from the config of each member's run, by its name.
    """
    names = [member.name for member in sweep.members]
    file = sweep.directory / SWEEP_FILE
    if (sweep.directory / IDENTITY_FILE).exists():
        raise InputError(
            f"{sweep.directory} belongs to a single run; choose another directory: "
            f"{how_to_set('Run.directory', 'DIRECTORY')}"
        )
    if file.exists():
        previous = list(read_object(file).nested("members").values)
        if previous != names:
            raise InputError(
                f"{sweep.directory} belongs to a sweep with other members: found "
                f"{shown(', '.join(previous))}; this one has {', '.join(names)}. "
                f"Choose another directory: {how_to_set('Run.directory', 'DIRECTORY')}"
            )
    frozen_model = sweep.members[0].training.fingerprint
    # Existing directories first: if one is refused, nothing has been created yet.
    changes = {
        member.name: claim(
            member.directory,
            member.config,
            frozen_model,
            data_record(member.training.run)
            | model_record(member.training.run)
            | record,
        )
        for member in sorted(
            sweep.members,
            key=lambda member: not (member.directory / IDENTITY_FILE).exists(),
        )
    }
    if not file.exists():
        content = {
            "members": {m.name: {"varies": dict(m.varies)} for m in sweep.members}
        }
        replace_file(file, json.dumps(content, indent=1) + "\n")
    return changes


def common_step(
    members: Sequence[SweepMember],
    stores: Sequence[CheckpointStore],
    say: Callable[[str], None],
) -> tuple[int, dict[str, str]]:
    """Finds the step from which a sweep resumes, and the members dropped before it.

    Args:
      members: members of the sweep.
      stores: checkpoints of each member.
      say: receives messages about damaged checkpoints and about the step.

    Returns:
      the newest step of which all members have an intact checkpoint, 0 if some have
      none yet; and the reasons for members dropped at or before it, by name.

    Raises:
      InputError: if every member has checkpoints, but none of the same step.
    """
    records = {m.name: read_diverged(m.directory) for m in members}
    dropped = {name: record for name, record in records.items() if record is not None}
    while True:
        live = [
            (member, store)
            for member, store in zip(members, stores, strict=True)
            if member.name not in dropped
        ]
        step = (
            _newest_common(live, say) if live else max(s for s, _ in dropped.values())
        )
        # A member that was dropped after this step takes part again, which may make
        # the common step older still.
        revived = [name for name, (at, _) in dropped.items() if at > step]
        if not revived:
            break
        for name in revived:
            del dropped[name]
    if step and len(dropped) < len(members):
        say(resumed_message(step, members[0].training.run.steps))
    return step, {name: reason for name, (_, reason) in dropped.items()}


def _newest_common(
    live: Sequence[tuple[SweepMember, CheckpointStore]], say: Callable[[str], None]
) -> int:
    """Returns the newest step with intact checkpoints of all live members, or 0."""
    steps_of_members = [set(store.steps()) for _, store in live]
    for step in sorted(set.intersection(*steps_of_members), reverse=True):
        try:
            for _, store in live:
                checkpoint_files.verify(store.folder / f"checkpoint_{step}")
        except InputError as problem:
            say(f"{problem}; step {step} is skipped")
        else:
            return step
    # A kill between the first saves leaves members with none and others with one.
    if all(steps_of_members) or max(map(len, steps_of_members)) > 1:
        raise InputError(
            "the members have no intact checkpoint of the same step: "
            + "; ".join(
                f"{member.name} has {sorted(steps)}"
                for (member, _), steps in zip(live, steps_of_members, strict=True)
            )
            + ". Resume each one separately (prompt-tuning train), or start the sweep "
            "in another directory"
        )
    if any(steps_of_members):
        say("starting from the beginning: not every member has a checkpoint")
    return 0


def read_diverged(directory: Path) -> tuple[int, str] | None:
    """Returns the step at which a member was dropped, and why; None if it was not."""
    file = directory / DIVERGED_FILE
    if not file.exists():
        return None
    record = read_object(file)
    return record.integer("step"), record.text("reason")


class _SweepLoop:
    """The mutable state of `train_sweep` between its start and its end."""

    def __init__(
        self,
        sweep: Sweep,
        recorders: Sequence[Recorder],
        reporter: Reporter,
        stopping: StopSignals,
        diverged: Mapping[str, str],
    ):
        self._sweep, self._run = sweep, sweep.run
        self._recorders, self._reporter = recorders, reporter
        self._stopping, self._diverged = stopping, dict(diverged)
        self._live = [
            k for k, member in enumerate(sweep.members) if member.name not in diverged
        ]
        for k in self._live:
            # Left over if all members resumed from before it was dropped.
            (sweep.members[k].directory / DIVERGED_FILE).unlink(missing_ok=True)

    def run_from(self, states: Sequence[TrainState], done: int) -> SweepOutcome:
        """Steps until the last step, a stop signal, or the last member is dropped."""
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
                # The new step runs on the device while the previous one is logged.
                if pending is not None:
                    self._record(*pending)
                pending = (done, metrics, batch)
                stop = self._stopping.due(done)
                if save_due(self._run, done) or stop:
                    self._record(*pending)
                    pending = None
                    self._measure_and_save(done, states)
        for recorder in self._recorders:
            recorder.wait()
        if done < last and self._live:
            self._reporter.say(stopped_message(done, last))
        finished = done == last
        interrupted = self._stopping.interrupted and not finished
        return SweepOutcome(done, finished, self._diverged, interrupted)

    def _record(self, step: int, metrics: Sequence[Any], batch: SweepBatch) -> None:
        values = jax.device_get(list(metrics))
        logged = {}
        for k in list(self._live):
            with self._dropping(k, step):
                logged[k] = self._recorders[k].record(step, values[k], batch.members[k])
        shown = [line for line in logged.values() if line is not None]
        self._reporter.advance(step, _brief(shown) if shown else None)

    def _measure_and_save(self, done: int, states: Sequence[TrainState]) -> None:
        measured = {}
        with contextlib.ExitStack() as pauses:
            for recorder in self._recorders:
                pauses.enter_context(recorder.meter.stopped())
                # All saves must end before any member deletes an old checkpoint.
                recorder.wait()
            for k in list(self._live):
                with self._dropping(k, done):
                    measured[k] = self._recorders[k].measure_and_save(done, states[k])
        if self._run.best_by is None or not any(measured.values()):
            return
        metric, direction = self._run.best_by
        choose = min if direction == "min" else max
        best = choose(measured, key=lambda k: measured[k][metric])
        values = [metrics[metric] for metrics in measured.values()]
        self._reporter.say(
            f"evaluation after step {done}: {metric} {min(values):.4f} to "
            f"{max(values):.4f}, best {self._sweep.members[best].name}"
        )

    @contextlib.contextmanager
    def _dropping(self, k: int, step: int):
        """Drops member `k` if one of its numbers is not finite."""
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
            self._reporter.say(f"{member.name} is dropped: {problem}")


def _brief(logged: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Summarizes all members: best and median loss, and their total speed."""
    losses = [line["loss"] for line in logged]
    return {
        "best_loss": min(losses),
        "median_loss": float(np.median(losses)),
        "tokens_per_second": sum(line["tokens_per_second"] for line in logged),
    }
