"""Record a run on disk: log lines, evaluations, checkpoints.

A run whose numbers are no longer finite ends before they are saved.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prompt_tuning import processes
from prompt_tuning.checkpoints.run_store.checkpoint_files import named_leaves
from prompt_tuning.checkpoints.run_store.checkpoint_store import CheckpointStore
from prompt_tuning.config.config_changes import ConfigChanges
from prompt_tuning.config.run import Run
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import NotFiniteError
from prompt_tuning.core.parameter_groups import match_any
from prompt_tuning.prompts.adapter_files import SCALINGS
from prompt_tuning.prompts.dora import LORA_A
from prompt_tuning.sharding.array_placement import Placement, largest_magnitudes
from prompt_tuning.streaming.layered_weights import LayeredWeight
from prompt_tuning.training.early_stopping import EXTRA, open_patience
from prompt_tuning.training.metrics_log import EVALUATION, open_log
from prompt_tuning.training.provenance import record_provenance
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step_fingerprints import Fingerprint, as_text, fingerprint
from prompt_tuning.training.throughput import Meter
from prompt_tuning.training.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Member:
    """A run and its checkpoints; it steps alone or together with others.

    It is dropped if it ended earlier because of a number that is not finite.
    """

    trainer: Trainer
    store: CheckpointStore
    config: str
    changes: ConfigChanges
    name: str = ""
    dropped: bool = False


class Recorder:
    """Writes log lines and checkpoints, and runs evaluations.

    Attributes:
      member: the run, after `done` steps.
      directory: its run directory.
      patience: tells whether early stopping ends the run now; None if it never does.
      measured: metrics of the last evaluation; empty before the first.
      meter: measures throughput.
    """

    def __init__(self, member: Member, done: int):
        self.member, trainer = member, member.trainer
        self._trainer, self._run, self._store = trainer, trainer.run, member.store
        self.directory = Path(self._run.directory)
        self.patience = open_patience(self._run, self._store.folder, done)
        self._log = open_log(self.directory, done, self._run.loggers)
        self._scalings = {
            path: lora.scaling
            for path, lora in trainer.model.loras.items()
            if path + LORA_A in trainer.start.trained
        }
        self.measured: dict[str, float] = {}
        self.meter = Meter()

    def _keep_frozen(self) -> None:
        """Writes the frozen parameters matched by `Run.save_paths`, once."""
        chosen = match_any(self._run.save_paths)
        arrays = {
            path: self._trainer.whole(path)
            for path in self._trainer.model.plan.abstract
            if chosen(path) and path not in self._trainer.start.trained
        }
        if processes.is_first():
            self._store.kept_prompts.keep_frozen(self._store.folder, arrays)

    def close(self) -> None:
        """Closes the log."""
        self._log.close()

    def record_start(self, done: int, trained: Mapping[str, Any], members: int) -> None:
        """Records what the run starts or resumes with, after `done` steps."""
        self._keep_frozen()
        if not done:
            self._log.write_fingerprint(0, as_text(fingerprint(trained)))
        processes.run_on_first(lambda: record_provenance(self._run, done, members))

    def record(
        self,
        step: int,
        metrics: Mapping[str, Any],
        batch: Batch,
        trained: Fingerprint | None = None,
    ) -> dict[str, float] | None:
        """Checks the metrics of a step, and logs them every `Run.log_every` steps.

        Returns the logged values; None if nothing was logged.

        Raises:
          NotFiniteError: if a metric is not finite.
        """
        values = {name: float(x) for name, x in metrics.items()}
        self._refuse_not_finite(f"of step {step}", values)
        self.meter.count(batch)
        if trained is not None:
            self._log.write_fingerprint(step, as_text(trained))
        if not log_due(self._run, step):
            return None
        epochs = step / self._trainer.batch_plan.batches_per_epoch
        logged = values | {"epoch": epochs} | self.meter.read()
        self._log.write(step, logged)
        return logged

    def measure_and_save(self, done: int, state: TrainState) -> dict[str, float]:
        """Evaluates if an evaluation is due, then saves a checkpoint.

        Returns the metrics; empty if no evaluation was due.

        Raises:
          NotFiniteError: if a number is not finite; nothing is saved then.
        """
        placement, store = self._trainer.model.placement, self._store
        shapes = state if placement is None else placement.abstract_tree(state)
        leaves = (shapes.trained, shapes.optimizer_state)
        # Arrays in host memory change in place: they are written before the next step.
        changing = bool(self._trainer.model.weight_storage.trained)
        sharded = store.is_sharded(*leaves) and not changing
        if sharded:
            # Nothing is gathered: each process checks its own shards.
            kept, largest = state, _largest_on_devices(state, placement)
        else:
            kept = state if placement is None else placement.replicate(state)
            largest = _largest_on_host(kept)
        self._refuse_not_finite(f"after step {done}", largest)
        measured = {}
        if evaluation_due(self._run, done) and self._trainer.evaluator is not None:
            measured = self._evaluate(done, state)
        saved = (done, kept.trained, kept.optimizer_state)
        extra = self._extra(done, state, measured)
        self._log.sync()
        if sharded:
            store.save_sharded(*saved, extra, shapes=leaves, metrics=measured)
        elif processes.is_first():
            store.save(*saved, extra, metrics=measured)
        return measured

    def forget_measurements(self) -> None:
        """Marks earlier log lines as measured with other settings."""
        self._log.forget_evaluations()

    def measure_again(self, step: int, state: TrainState) -> dict[str, float]:
        """Evaluates a checkpoint with changed settings.

        Replaces its metrics and restarts the counting of early stopping.
        """
        measured = self._evaluate(step, state)
        if processes.is_first():
            self._store.replace_metrics(step, measured, without=EXTRA)
        if self.patience is not None:
            self.patience = self.patience.with_state({})
        return measured

    def _extra(
        self, done: int, state: TrainState, measured: Mapping[str, float]
    ) -> dict[str, Any]:
        extra = {
            "key": np.asarray(jax.random.key_data(state.key)).tolist(),
            "examples": self._trainer.batch_plan.examples_before(done),
            SCALINGS: self._scalings,
        }
        if self.patience is not None:
            self.patience = self.patience.observe(done, measured)
            extra[EXTRA] = self.patience.state()
        return extra

    def wait(self) -> None:
        """Waits for a save in progress; raises its error if it failed."""
        self._store.wait()

    def _evaluate(self, done: int, state: TrainState) -> dict[str, float]:
        assert self._trainer.evaluator is not None
        parameters = self._trainer.parameters(state.trained)
        self.measured = self._trainer.evaluator(parameters)
        self._refuse_not_finite(f"of the evaluation after step {done}", self.measured)
        named = {f"{EVALUATION}{name}": x for name, x in self.measured.items()}
        self._log.write(done, named)
        return self.measured

    def _refuse_not_finite(self, when: str, values: Mapping[str, Any]) -> None:
        """Raises an error if a value is not finite."""
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        if not bad:
            return
        name = "loss" if "loss" in bad else bad[0]
        self.wait()
        steps, trainer = self._store.steps(), self._trainer
        kept = (
            f"the checkpoint of step {steps[-1]} is kept as the last good one"
            if steps
            else "no checkpoint had been written yet"
        )
        found = f"the {name} {when} is {values[name]}"
        weights = trainer.model.weight_storage.with_streamed(trainer.frozen)
        broken = find_not_finite(weights)
        if broken is not None:
            raise NotFiniteError(
                f"{found}, because the frozen parameter {broken} of "
                f"{trainer.run.model.checkpoint} has numbers that are not finite; "
                f"{kept}. Copy or convert the model's weights again"
            )
        raise NotFiniteError(
            f"{found}; {kept}. Lower the learning rate, "
            "clip the gradient, or start the prompt from vocabulary rows"
        )


def log_due(run: Run, done: int) -> bool:
    """Whether a line of the log is due after `done` steps."""
    return done == run.steps or _every(done, run.log_every)


def save_due(run: Run, done: int) -> bool:
    """Whether a checkpoint is due after `done` steps."""
    return evaluation_due(run, done) or _every(done, run.save_every)


def evaluation_due(run: Run, done: int) -> bool:
    """Whether an evaluation is due after `done` steps."""
    return done == run.steps or _every(done, run.evaluate_every)


def _every(step: int, period: int) -> bool:
    return period > 0 and step % period == 0


def _largest_on_host(state: TrainState) -> dict[str, float]:
    """Returns the largest absolute value of each saved leaf, by name."""
    return _named(
        jax.tree.map(
            lambda leaf: np.max(np.abs(leaf), initial=0),
            (state.trained, state.optimizer_state),
        )
    )


def _largest_on_devices(
    state: TrainState, placement: Placement | None
) -> dict[str, float]:
    """Computes `_largest_on_host` on the devices, the same in all processes."""
    leaves = (state.trained, state.optimizer_state)
    reduce = (
        jax.jit(largest_magnitudes)
        if placement is None
        else placement.largest_magnitudes
    )
    return _named(jax.device_get(reduce(leaves)))


def _named(largest: tuple[dict[str, Any], Any]) -> dict[str, float]:
    trained, optimizer_state = largest
    moments = {f"optimizer's {p}": x for p, x in named_leaves(optimizer_state).items()}
    return {name: float(x) for name, x in (trained | moments).items()}


def find_not_finite(weights: Mapping[str, Any]) -> str | None:
    """Returns the path of the first parameter that is not finite; None without one.

    With several processes, each reads its own shards of `weights`, because not all of
    them have the same parameters.
    """
    for path, weight in weights.items():
        if jnp.issubdtype(weight.dtype, jnp.floating) and not all(
            np.isfinite(part).all() for part in _parts(weight)
        ):
            return path
    return None


def _parts(weight: Any) -> Iterator[np.ndarray]:
    """Yields a parameter in parts, one in host memory at a time."""
    if isinstance(weight, LayeredWeight):
        yield from map(weight.read, range(weight.shape[0]))
    else:
        yield from (np.asarray(shard.data) for shard in weight.addressable_shards)
