"""The training loop: step, log, evaluate, save.

A run that is killed at any moment and started again resumes from its newest complete
checkpoint and ends with the same bits: batches and random keys are functions of the
step number, and a checkpoint holds everything else that a step reads.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from prompt_tuning import processes
from prompt_tuning.config.config_changes import ConfigChanges
from prompt_tuning.config.written_config import run_config
from prompt_tuning.core.activity import displayed_by
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.data.batching.batches import stream_batches
from prompt_tuning.training.compile_ahead import compiling_ahead
from prompt_tuning.training.continuation import adopt_changes, resume
from prompt_tuning.training.data_record import data_record
from prompt_tuning.training.early_stopping import (
    STOPPED_FILE,
    open_patience,
    record_stop,
)
from prompt_tuning.training.metrics_log import open_log
from prompt_tuning.training.progress import (
    Callback,
    CallbackReporter,
    Reporter,
    python_reporter,
)
from prompt_tuning.training.recorder import Recorder, save_due
from prompt_tuning.training.run_directory import (
    check_steps,
    claim,
    hold_run,
    model_record,
    open_store,
)
from prompt_tuning.training.signals import stop_signals
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step_profile import StepProfile
from prompt_tuning.training.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """Outcome of a call of `train`, and the `result` of what `tune` returns.

    Attributes:
      step: number of completed steps.
      finished: whether the run is complete; False if a signal stopped it, and the same
        command resumes it.
      trained: trained parameters after the last step.
      metrics: metrics of the last evaluation in this call; empty without one.
      reason: why the run stopped before its last step, by `Run.early_stopping`; None if
        it did not.
      interrupted: whether Ctrl-C stopped the run.
      epochs: how often the completed steps have read each example.

    Examples:
      >>> tuned.result.finished, tuned.result.epochs
      (True, 2.0)
    """

    step: int
    finished: bool
    trained: Parameters
    metrics: dict[str, float]
    reason: str | None = None
    interrupted: bool = False
    epochs: float = 0.0


def train(
    training: Trainer,
    *,
    config: str | None = None,
    record: dict[str, Any] | None = None,
    make_reporter: Callable[[int], Reporter] | None = None,
    callbacks: Sequence[Callback] = (),
    notes: Sequence[str] = (),
) -> TrainingResult:
    """Trains an opened run until the last step, early stopping, SIGTERM or SIGINT.

    Holds the run directory meanwhile, so that no second process writes to it, and
    starts from its newest complete checkpoint, if there is one.

    Args:
      training: the opened run, from `open_run`.
      config: operative config, written to the run directory; None writes the run's own
        fields.
      record: JSON values written next to it, such as compiler flags.
      make_reporter: makes the progress display, given the number of completed steps;
        None shows a bar or lines.
      callbacks: functions called with a step and its logged metrics; where one returns
        true, the run saves and stops.
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
    with hold_run(training.run.directory):
        return train_held(
            training,
            config=config,
            record=record,
            make_reporter=make_reporter,
            callbacks=callbacks,
            notes=notes,
        )


def train_held(
    training: Trainer,
    *,
    config: str | None = None,
    record: dict[str, Any] | None = None,
    make_reporter: Callable[[int], Reporter] | None = None,
    callbacks: Sequence[Callback] = (),
    notes: Sequence[str] = (),
    profile: Path | None = None,
) -> TrainingResult:
    """Trains in a run directory that the caller holds (see `hold_run`).

    Starts from the newest complete checkpoint in the run directory, if there is one.

    Args:
      training: the opened run.
      config: operative config, written to the run directory; None writes the run's
        own fields.
      record: JSON values written next to it, such as compiler flags.
      make_reporter: makes the progress display, given the number of completed steps;
        None shows a bar or lines.
      callbacks: functions called with a step and its logged metrics; where one returns
        true, the run saves and stops.
      notes: lines to show first.
      profile: folder for a trace of three steps; None for no trace.

    Raises:
      InputError: if the directory belongs to another run.
      NotFiniteError: if the loss is not finite.
    """
    run = training.run
    directory = Path(run.directory)
    config = run_config(run) if config is None else config
    make_reporter = make_reporter or functools.partial(python_reporter, run.steps)
    frozen_model = training.fingerprint
    record = data_record(run) | model_record(run) | (record or {})
    processes.check_same("frozen parameters", lambda: [frozen_model])
    changes = ConfigChanges(
        **processes.run_on_first(
            lambda: vars(claim(directory, config, frozen_model, record))
        )
    )
    store = open_store(run)
    messages = list(notes)
    state = resume(training, store, messages.append)
    done = int(state.step)
    check_steps(directory, done, run.steps)
    if done:
        store.finish_deletion(done)
    patience = open_patience(run, store.folder, done)
    with (
        make_reporter(done) as reporter,
        displayed_by(reporter.doing),
        contextlib.closing(open_log(directory, done)) as log,
        stop_signals() as stopping,
        contextlib.closing(store),
        compiling_ahead(training, state, run.steps),
        contextlib.closing(StepProfile(profile, done, run.steps)) as step_profile,
    ):
        for message in messages:
            reporter.say(message)
        recorder = Recorder(training, store, log, patience)
        recorder.keep_frozen()
        watching = CallbackReporter(reporter, callbacks)
        adopt_changes(training, store, changes, config, recorder, watching)
        result = _Loop(
            training,
            recorder,
            watching,
            lambda step: stopping.due(step) or watching.stopped,
            step_profile,
        ).run_from(state)
        interrupted = stopping.interrupted and not result.finished
        return dataclasses.replace(result, interrupted=interrupted)


def stopped_message(step: int, steps: int) -> str:
    """Message of a run that a signal stopped."""
    return f"stopped at step {step} of {steps}; the same command resumes from there"


class _Loop:
    """Mutable state of `train`: the step in progress and its display."""

    def __init__(
        self,
        training: Trainer,
        recorder: Recorder,
        reporter: Reporter,
        stopping: Callable[[int], bool],
        profile: StepProfile,
    ):
        self._profile = profile
        self._training, self._run = training, training.run
        self._reporter, self._stopping = reporter, stopping
        self._recorder = recorder

    def run_from(self, state: TrainState) -> TrainingResult:
        """Steps until the last step, a stop signal, or early stopping."""
        done, last = int(state.step), self._run.steps
        if self._recorder.reason is None and processes.is_first():
            # The run had stopped early, and continues with other settings.
            (Path(self._run.directory) / STOPPED_FILE).unlink(missing_ok=True)
        pending = None
        for batch in self._recorder.meter.waiting(self._batches(done)):
            with self._profile.step(done):
                state, metrics = self._training.advance(state, batch)
            done += 1
            self._profile.finish_step(done, metrics)
            # The device runs this step while the host handles the metrics before it.
            if pending is not None:
                self._record(*pending)
            pending = (done, metrics, batch)
            stop = self._stopping(done)
            if save_due(self._run, done) or stop:
                self._record(*pending)
                pending = None
                self._measure_and_save(done, state)
            if stop or self._recorder.reason is not None:
                break
        self._recorder.wait()
        reason = self._recorder.reason if done < last else None
        if reason is not None:
            if processes.is_first():
                record_stop(Path(self._run.directory), done, reason)
            self._reporter.say(f"stopped after step {done} of {last}: {reason}")
        elif done < last:
            self._reporter.say(stopped_message(done, last))
        finished = done == last or reason is not None
        measured = self._recorder.measured
        epochs = done / self._training.batch_plan.batches_per_epoch
        return TrainingResult(
            done, finished, state.trained, measured, reason, epochs=epochs
        )

    def _batches(self, start: int) -> Iterator[Batch]:
        if self._recorder.reason is not None:
            return iter(())
        return stream_batches(
            self._training.examples,
            self._training.batch_plan,
            start,
            self._run.steps,
            pad_id=self._training.model.config.pad_id,
        )

    def _record(self, step: int, metrics: dict[str, Any], batch: Batch) -> None:
        with jax.profiler.TraceAnnotation("record metrics"):
            logged = self._recorder.record(step, jax.device_get(metrics), batch)
            self._reporter.advance(step, logged)

    def _measure_and_save(self, done: int, state: TrainState) -> None:
        named = jax.profiler.TraceAnnotation("measure and save")
        with named, self._recorder.meter.stopped():
            measured = self._recorder.measure_and_save(done, state)
        if measured:
            self._reporter.evaluated(done, measured)
