"""The training loop: step, log, evaluate, save, for one run or a sweep's members.

A killed run that is started again resumes from its newest complete checkpoint and ends
with the same bits: batches and random keys are functions of the step number, and a
checkpoint holds everything else that a step reads.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from prompt_tuning import processes
from prompt_tuning.config.config_values import STOPPED_FILE
from prompt_tuning.config.python_config import run_config
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import NotFiniteError
from prompt_tuning.core.status_line import show_status
from prompt_tuning.training import progress, run_directory
from prompt_tuning.training.batch_sources import BatchSource, open_batches
from prompt_tuning.training.compile_ahead import compiling_ahead
from prompt_tuning.training.continuation import adopt_changes, resume
from prompt_tuning.training.early_stopping import record_stop
from prompt_tuning.training.member_batches import MemberBatches
from prompt_tuning.training.recorder import Member, Recorder, log_due, save_due
from prompt_tuning.training.signals import StopSignals, stop_signals
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step import Metrics
from prompt_tuning.training.step_fingerprints import Fingerprint, fingerprint
from prompt_tuning.training.step_profile import StepProfile
from prompt_tuning.training.stored_columns import CompletedExamples, CompletedGroups
from prompt_tuning.training.trainer import Trainer
from prompt_tuning.training.training_result import TrainingResult


def train(
    training: Trainer,
    *,
    config: str | None = None,
    record: dict[str, Any] | None = None,
    make_reporter: Callable[[int], progress.Reporter] | None = None,
    callbacks: Sequence[progress.Callback] = (),
    notes: Sequence[str] = (),
) -> TrainingResult:
    """Trains an opened run until the last step, early stopping, SIGTERM or SIGINT.

    Resumes from the run directory's newest complete checkpoint, if any. Holds the
    directory meanwhile, so that no other process writes to it.

    Args:
      training: the opened run, from `open_run`.
      config: operative config to write to the run directory; None for the run's fields.
      record: JSON values to write next to it, e.g. compiler flags.
      make_reporter: makes the progress display, given the number of completed steps;
        None for a bar or lines.
      callbacks: functions called with a step and its logged metrics. If one returns
        True, the run saves a checkpoint and stops.
      notes: lines to show first.

    Raises:
      InputError: if the directory belongs to another run.
      NotFiniteError: if the loss is not finite.

    Examples:
      >>> result = pt.train(pt.open_run(run, reuse=model.parameters))
      compiling ...
      >>> result.step, result.finished
      (2, True)
    """
    with run_directory.hold_run(training.run.directory):
        return train_held(
            training,
            config=config,
            record=record,
            make_reporter=make_reporter,
            callbacks=callbacks,
            notes=notes,
        )


def train_held(
    trainer: Trainer,
    *,
    config: str | None = None,
    record: dict[str, Any] | None = None,
    make_reporter: Callable[[int], progress.Reporter] | None = None,
    callbacks: Sequence[progress.Callback] = (),
    notes: Sequence[str] = (),
    profile: Path | None = None,
) -> TrainingResult:
    """Trains like `train`, in a run directory that the caller holds (see `hold_run`).

    `profile` is a folder for a trace of three steps.
    """
    run = trainer.run
    config = run_config(run) if config is None else config
    frozen_model = trainer.fingerprint
    processes.check_same("frozen parameters", lambda: [frozen_model])
    changes = run_directory.claim_run(
        run, trainer.model, config, frozen_model, record or {}
    )
    store = run_directory.open_store(run)
    messages = list(notes)
    state = resume(trainer, store, messages.append)
    done = int(state.step)
    run_directory.check_steps(Path(run.directory), done, run.steps)
    (result,) = loop(
        [Member(trainer, store, config, changes)],
        [state],
        done,
        make_reporter=make_reporter
        or functools.partial(progress.python_reporter, run.steps),
        messages=messages,
        callbacks=callbacks,
        profile=profile,
    )
    return result


Drop = Callable[[Member, int, NotFiniteError], None]
"""Records that a member was dropped after some number of steps, and why."""


def loop(
    members: Sequence[Member],
    states: Sequence[TrainState],
    done: int,
    *,
    make_reporter: Callable[[int], progress.Reporter],
    messages: Sequence[str] = (),
    callbacks: Sequence[progress.Callback] = (),
    profile: Path | None = None,
    drop: Drop | None = None,
) -> list[TrainingResult]:
    """Steps members until the last step, a stop signal, or early stopping.

    `drop` is called with a member that has a number that is not finite, while the
    others continue; None raises the error. Returns the result of each member.
    """
    first = members[0].trainer
    steps = first.run.steps
    with (
        make_reporter(done) as reporter,
        show_status(reporter.doing),
        contextlib.ExitStack() as resources,
    ):
        recorders = []
        for member in members:
            if done:
                member.store.finish_deletion(done)
            recorder = Recorder(member, done)
            resources.enter_context(contextlib.closing(recorder))
            recorders.append(recorder)
        stopping = resources.enter_context(stop_signals())
        for member in members:
            resources.enter_context(contextlib.closing(member.store))
        if len(members) == 1:
            resources.enter_context(compiling_ahead(first, states[0], steps))
        step_profile = StepProfile(profile, done, steps)
        resources.enter_context(contextlib.closing(step_profile))
        for message in messages:
            reporter.say(message)
        watching = progress.CallbackReporter(reporter, callbacks)
        for recorder, state in zip(recorders, states, strict=True):
            if recorder.member.changes.any_allowed:
                adopt_changes(recorder, watching)
            recorder.record_start(done, state.trained, len(members))
        examples = first.examples
        if isinstance(examples, CompletedExamples | CompletedGroups) and done < steps:
            # Here, not in the thread that reads batches: processes must meet in the
            # same order.
            examples.stored.read()
        batches = open_batches(
            [member.trainer for member in members],
            [recorder.meter for recorder in recorders],
            done,
            [k for k, member in enumerate(members) if not member.dropped],
        )
        running = _Loop(recorders, watching, stopping, step_profile, drop, batches)
        return running.run_from(states, done)


class _Loop:
    """State of `loop`: the step in progress and its display."""

    def __init__(
        self,
        recorders: Sequence[Recorder],
        reporter: progress.CallbackReporter,
        stopping: StopSignals,
        profile: StepProfile,
        drop: Drop | None,
        batches: BatchSource,
    ):
        self._recorders = recorders
        self._reporter, self._stopping = reporter, stopping
        self._profile, self._drop = profile, drop
        # All members share the frozen parameters, the step and its settings.
        self._first = recorders[0].member.trainer
        self._run = self._first.run
        self._live = [k for k, x in enumerate(recorders) if not x.member.dropped]
        self._batches = batches

    def run_from(self, states: Sequence[TrainState], done: int) -> list[TrainingResult]:
        """Steps until the last step, a stop signal, or early stopping."""
        last, pending, stop = self._run.steps, None, False
        if self._reason is None and processes.is_first():
            for recorder in self._recorders:
                # The run had stopped early, and continues with changed settings.
                (recorder.directory / STOPPED_FILE).unlink(missing_ok=True)
        with contextlib.closing(self._batches):
            while done < last and self._live and not stop:
                if self._reason is not None and self._batches.between(done):
                    break
                batch, sampled = self._batches.next(states, done)
                with self._profile.step(done):
                    states, metrics = self._advance(states, batch.whole)
                metrics = [a | b for a, b in zip(metrics, sampled, strict=True)]
                done += 1
                self._profile.finish_step(done, metrics)
                # The device runs this step while the host handles the previous metrics.
                if pending is not None:
                    self._record(*pending)
                stop = self._stopping.due(done) or self._reporter.stopped
                stop = self._batches.between(done) and (stop or bool(self._reason))
                saves = save_due(self._run, done) or stop
                pending = (
                    done,
                    metrics,
                    batch,
                    self._fingerprints(states, done, saves),
                )
                if saves:
                    self._record(*pending)
                    pending = None
                    self._measure_and_save(done, states)
        for recorder in self._recorders:
            recorder.wait()
        return self._results(states, done)

    @property
    def _reason(self) -> str | None:
        """Returns why early stopping ends the loop now; None to continue."""
        patience = self._recorders[0].patience
        return (patience and patience.reason) or self._batches.reason

    def _advance(
        self, states: Sequence[TrainState], batch: Batch
    ) -> tuple[Sequence[TrainState], Sequence[Metrics]]:
        placement = self._first.model.placement
        if placement is not None and self._first.stages is None:
            batch = placement.put_batch(batch)
        if len(self._recorders) > 1:
            return self._first.step(states, self._first.inputs, batch)
        state, metrics = self._first.step(states[0], self._first.inputs, batch)
        return [state], [metrics]

    def _fingerprints(
        self, states: Sequence[TrainState], done: int, saves: bool
    ) -> Sequence[Fingerprint | None]:
        # Before the next step, which reuses the memory of the states.
        if saves or log_due(self._run, done):
            return [fingerprint(state.trained) for state in states]
        return [None] * len(states)

    def _results(self, states: Sequence[TrainState], done: int) -> list[TrainingResult]:
        """Reports why the loop ended; returns the result of each member."""
        last = self._run.steps
        reason = self._reason if done < last else None
        if reason is not None:
            if processes.is_first():
                for recorder in self._recorders:
                    record_stop(recorder.directory, done, reason)
            self._reporter.say(f"stopped after step {done} of {last}: {reason}")
        elif done < last and self._live:
            self._reporter.say(
                f"stopped at step {done} of {last}; the same command resumes from there"
            )
        finished = done == last or reason is not None
        return [
            TrainingResult(
                done,
                finished,
                states[k].trained,
                recorder.measured,
                reason,
                interrupted=self._stopping.interrupted and not finished,
                epochs=done / recorder.member.trainer.batch_plan.batches_per_epoch,
            )
            for k, recorder in enumerate(self._recorders)
        ]

    def _record(
        self,
        step: int,
        metrics: Sequence[Any],
        batch: MemberBatches,
        trained: Sequence[Fingerprint | None],
    ) -> None:
        with jax.profiler.TraceAnnotation("record metrics"):
            values, lines = jax.device_get(list(metrics)), []
            for k in list(self._live):
                with self._dropping(k, step):
                    lines.append(
                        self._recorders[k].record(
                            step, values[k], batch.members[k], trained[k]
                        )
                    )
            self._reporter.advance(
                step, progress.joint_metrics([x for x in lines if x])
            )

    def _measure_and_save(self, done: int, states: Sequence[TrainState]) -> None:
        measured = {}
        with (
            jax.profiler.TraceAnnotation("measure and save"),
            contextlib.ExitStack() as pauses,
        ):
            self._batches.sync()
            for recorder in self._recorders:
                pauses.enter_context(recorder.meter.stopped())
                # All saves must end before any member deletes an old checkpoint.
                recorder.wait()
            for k in list(self._live):
                with self._dropping(k, done):
                    measured[k] = self._recorders[k].measure_and_save(done, states[k])
        if not any(measured.values()):
            return
        if len(self._recorders) == 1:
            self._reporter.evaluated(done, measured[0])
        elif self._run.best_by is not None:
            by_name = {
                self._recorders[k].member.name: found for k, found in measured.items()
            }
            line = progress.comparison_line(done, by_name, *self._run.best_by)
            self._reporter.say(line)

    @contextlib.contextmanager
    def _dropping(self, k: int, step: int) -> Iterator[None]:
        """Drops member `k` if one of its numbers is not finite."""
        try:
            yield
        except NotFiniteError as problem:
            if self._drop is None:
                raise
            self._live.remove(k)
            self._batches.drop(k)
            member = self._recorders[k].member
            self._drop(member, step, problem)
            self._reporter.say(f"{member.name} is dropped: {problem}")
