"""A training run: prepare and check everything, then step, log, measure and save.

A run killed at any moment and started again goes on from its newest whole checkpoint
and ends with the same bits: batches follow from the step's number, random keys too, and
a checkpoint holds all that a step reads.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prompt_tuning import processes
from prompt_tuning.adapters.adapter_files import SCALINGS
from prompt_tuning.checkpoints.run_store.checkpoint_store import (
    CheckpointStore,
    holds_checkpoints,
)
from prompt_tuning.checkpoints.run_store.orbax_arrays import StoredArray
from prompt_tuning.config.run import Run
from prompt_tuning.core import parameter_groups
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.data.batching.batches import stream_batches
from prompt_tuning.losses.objective import Objective
from prompt_tuning.training.early_stopping import (
    EXTRA,
    Patience,
    open_patience,
    record_stop,
)
from prompt_tuning.training.finite_checks import (
    largest_on_devices,
    largest_on_host,
    refuse_not_finite,
)
from prompt_tuning.training.metrics_log import MetricsLog, NoLog, open_log
from prompt_tuning.training.progress import Reporter
from prompt_tuning.training.run_directory import claim, open_store
from prompt_tuning.training.run_plan import RunPlan, open_run
from prompt_tuning.training.signals import StopDue, stop_signals
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step import compile_step
from prompt_tuning.training.streamed_step import StreamedStep
from prompt_tuning.training.throughput import Meter
from prompt_tuning.training.trainer import Step, Trainer


def prepare(run: Run) -> Trainer:
    """Opens and checks everything that the run needs, then reads the frozen model.

    Raises:
      InputError: if something cannot be used.
    """
    opened = open_run(run)
    model = opened.model
    examples = opened.examples()
    objective = opened.objective(examples)
    plan, evaluator = opened.plan(examples), opened.evaluator()
    goes_on = processes.run_on_first(lambda: holds_checkpoints(run.directory))
    transfer = None if goes_on else opened.transfer()
    parameters = model.read_parameters()
    start = opened.start(parameters, transfer)
    _, frozen = parameter_groups.partition(parameters, opened.labels)
    step = _step(opened, objective)
    return Trainer(run, model, frozen, start, step, examples, plan, evaluator, transfer)


def _step(opened: RunPlan, objective: Objective) -> Step:
    model = opened.model
    if model.weight_storage.streamed:
        return StreamedStep(
            model.graph,
            opened.optimizer,
            model.weight_storage.streamed,
            dropout=model.drops,
            objective=objective,
        )
    return compile_step(
        model.graph,
        opened.optimizer,
        dropout=model.drops,
        objective=objective,
        placement=model.placement,
    )


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """How a run ended.

    Attributes:
      step: steps done.
      finished: False if a signal stopped it early; the same command goes on.
      reason: why it stopped before its last step, where it had had enough; see
        `Run.early_stopping`.
      trained: the trained parameters at the end.
      metrics: of the last evaluation of this start; empty without one.
    """

    step: int
    finished: bool
    trained: Parameters
    metrics: dict[str, float]
    reason: str | None = None


def train(
    training: Trainer,
    *,
    config: str = "",
    record: dict[str, Any] | None = None,
    make_reporter: Callable[[int], Reporter],
) -> TrainingResult:
    """Runs to the end, or to SIGTERM or SIGINT, from wherever the directory is.

    Args:
      training: the prepared run.
      config: the operative config, kept in the directory.
      record: JSON that is kept beside it, such as compiler flags.
      make_reporter: given the steps already done, shows progress.

    Raises:
      InputError: if the directory belongs to another run.
      NotFiniteError: if the loss is not finite.
    """
    run = training.run
    directory = Path(run.directory)
    frozen_model = training.fingerprint
    processes.check_same("frozen parameters", lambda: [frozen_model])
    processes.run_on_first(lambda: claim(directory, config, frozen_model, record or {}))
    store = open_store(run)
    messages: list[str] = []
    state = resume(training, store, messages.append)
    done = int(state.step)
    patience = open_patience(run, store.folder, done)
    with (
        make_reporter(done) as reporter,
        contextlib.closing(open_log(directory, done)) as log,
        stop_signals() as stopping,
        contextlib.closing(store),
    ):
        for message in messages:
            reporter.say(message)
        recorder = Recorder(training, store, log, patience)
        return _Loop(training, recorder, reporter, stopping).run_from(state)


def resume(
    training: Trainer, store: CheckpointStore, say: Callable[[str], None]
) -> TrainState:
    """The state of the newest whole checkpoint, or the start where there is none."""
    newest = processes.run_on_first(lambda: store.latest_valid(on_damage=say))
    if newest is None:
        return training.start
    say(resumed_message(newest, training.run.steps))
    return state_at(training, store, newest)


def resumed_message(step: int, steps: int) -> str:
    """What a run says that starts from a checkpoint of one of its steps."""
    if step < steps:
        return f"going on from step {step}"
    return f"all {step} steps were done before"


def stopped_message(step: int, steps: int) -> str:
    """What a run says that a signal stops after one of its steps."""
    return f"stopped at step {step} of {steps}; the same command goes on from there"


def state_at(training: Trainer, store: CheckpointStore, step: int) -> TrainState:
    """The state that a checkpoint holds.

    Raises:
      InputError: if it is damaged, or belongs to another run.
    """
    start = training.start
    placement = training.model.placement
    if placement is not None:
        start = placement.abstract_tree(start)
    trained, optimizer_state, extra = store.load(
        step, start.optimizer_state, trained_template=start.trained
    )
    state = TrainState(
        trained=trained,
        optimizer_state=optimizer_state,
        step=np.asarray(step, np.int32),
        key=jax.random.wrap_key_data(jnp.asarray(extra["key"], jnp.uint32)),
    )
    if placement is not None:
        return placement.put_tree(state)
    return jax.tree.map(_on_device, state)


def _on_device(leaf: Any) -> jax.Array:
    return jnp.asarray(np.asarray(leaf) if isinstance(leaf, StoredArray) else leaf)


class _Loop:
    """The mutable middle of `train`: what is pending, and what was measured last."""

    def __init__(
        self,
        training: Trainer,
        recorder: "Recorder",
        reporter: Reporter,
        stopping: StopDue,
    ):
        self._training, self._run = training, training.run
        self._reporter, self._stopping = reporter, stopping
        self._recorder = recorder

    def run_from(self, state: TrainState) -> TrainingResult:
        """Steps until the run's last step, a stop signal, or enough evaluations."""
        done, last = int(state.step), self._run.steps
        pending = None
        for batch in self._recorder.meter.waiting(self._batches(done)):
            state, metrics = self._training.advance(state, batch)
            done += 1
            # The step just sent off runs while the one before it is looked at.
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
        return TrainingResult(done, finished, state.trained, measured, reason)

    def _batches(self, start: int) -> Iterator[Batch]:
        if self._recorder.reason is not None:
            return iter(())
        return stream_batches(
            self._training.examples,
            self._training.plan,
            start,
            self._run.steps,
            pad_id=self._training.model.config.pad_id,
        )

    def _record(self, step: int, metrics: dict[str, Any], batch: Batch) -> None:
        logged = self._recorder.record(step, jax.device_get(metrics), batch)
        self._reporter.advance(step, logged)

    def _measure_and_save(self, done: int, state: TrainState) -> None:
        with self._recorder.meter.stopped():
            measured = self._recorder.measure_and_save(done, state)
        if measured:
            shown = "  ".join(f"{name} {x:.4f}" for name, x in measured.items())
            self._reporter.say(f"evaluation after step {done}: {shown}")


class Recorder:
    """What a run leaves on the disk: lines of the log, evaluations, checkpoints.

    Attributes:
      measured: the last evaluation; empty before the first.
      meter: of the run's speed.
    """

    def __init__(
        self,
        training: Trainer,
        store: CheckpointStore,
        log: MetricsLog | NoLog,
        patience: Patience | None = None,
    ):
        self._training, self._run = training, training.run
        self._store, self._log, self._patience = store, log, patience
        loras = self._run.tuning.loras(training.start.trained)
        self._scalings = {path: lora.scaling for path, lora in loras.items()}
        self.measured: dict[str, float] = {}
        self.meter = Meter()

    @property
    def reason(self) -> str | None:
        """Why the run stops now; None while it goes on."""
        return None if self._patience is None else self._patience.reason

    def record(
        self, step: int, metrics: Mapping[str, Any], batch: Batch
    ) -> dict[str, float] | None:
        """Checks a step's metrics, and logs them where that is due.

        Returns:
          what was logged, or None.

        Raises:
          NotFiniteError: if a metric is not finite.
        """
        found = {name: float(x) for name, x in metrics.items()}
        self._refuse_not_finite(f"of step {step}", found)
        self.meter.count(batch)
        if not _every(step, self._run.log_every) and step != self._run.steps:
            return None
        logged = found | self.meter.read()
        self._log.write(step, logged)
        return logged

    def measure_and_save(self, done: int, state: TrainState) -> dict[str, float]:
        """Saves; before that evaluates where due, at a stop too: the best is kept.

        Returns:
          what was measured; empty where no evaluation was due.

        Raises:
          NotFiniteError: if a number is not finite; nothing was saved then.
        """
        placement, store = self._training.model.placement, self._store
        shapes = state if placement is None else placement.abstract_tree(state)
        own = (shapes.trained, shapes.optimizer_state)
        sharded = store.is_sharded(*own)
        if sharded:
            # Nothing is put together: all processes look, each at its own parts.
            kept, largest = state, largest_on_devices(state, placement)
        else:
            kept = state if placement is None else placement.replicate(state)
            largest = largest_on_host(kept)
        self._refuse_not_finite(f"after step {done}", largest)
        measured = {}
        if evaluation_due(self._run, done) and self._training.evaluator is not None:
            measured = self._evaluate(done, state)
        saved = (done, kept.trained, kept.optimizer_state)
        extra = self._extra(done, state, measured)
        if sharded:
            store.save_sharded(*saved, extra, shapes=own, metrics=measured)
        elif processes.is_first():
            store.save(*saved, extra, metrics=measured)
        return measured

    def _extra(
        self, done: int, state: TrainState, measured: Mapping[str, float]
    ) -> dict[str, Any]:
        """What a checkpoint holds beside arrays."""
        extra = {
            "key": np.asarray(jax.random.key_data(state.key)).tolist(),
            "examples": self._training.plan.examples_before(done),
            SCALINGS: self._scalings,
        }
        if self._patience is not None:
            self._patience = self._patience.observe(done, measured)
            extra[EXTRA] = self._patience.state()
        return extra

    def wait(self) -> None:
        """Waits for the save that is under way; what failed in it is raised."""
        self._store.wait()

    def _evaluate(self, done: int, state: TrainState) -> dict[str, float]:
        assert self._training.evaluator is not None
        parameters = self._training.parameters(state.trained)
        self.measured = self._training.evaluator(parameters)
        self._refuse_not_finite(f"of the evaluation after step {done}", self.measured)
        named = {f"evaluation/{name}": x for name, x in self.measured.items()}
        self._log.write(done, named)
        return self.measured

    def _refuse_not_finite(self, when: str, found: Mapping[str, Any]) -> None:
        refuse_not_finite(when, found, self._store)


def save_due(run: Run, done: int) -> bool:
    """Whether a checkpoint is due after so many steps."""
    return evaluation_due(run, done) or _every(done, run.save_every)


def evaluation_due(run: Run, done: int) -> bool:
    """Whether an evaluation is due after so many steps."""
    return done == run.steps or _every(done, run.evaluate_every)


def _every(step: int, period: int) -> bool:
    return period > 0 and step % period == 0
