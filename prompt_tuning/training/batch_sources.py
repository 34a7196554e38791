"""Where the batches of a loop come from: data, or the model's own answers."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax

from prompt_tuning import processes
from prompt_tuning.core.errors import InputError
from prompt_tuning.rollouts.prompt_table import RolloutPrompts
from prompt_tuning.rollouts.rollout_stream import RolloutStream
from prompt_tuning.training.member_batches import MemberBatches, stream_members
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.throughput import Meter
from prompt_tuning.training.trainer import Trainer


@runtime_checkable
class BatchSource(Protocol):
    """Makes the batch of each step."""

    @property
    def reason(self) -> str | None:
        """Why the run stops before its last step; None while it continues."""
        ...

    def next(
        self, states: Sequence[TrainState], done: int
    ) -> tuple[MemberBatches, dict[str, float]]:
        """Returns the batch of the next step, and metrics of how it was made.

        Args:
          states: state of each member.
          done: number of completed steps.
        """
        ...

    def between(self, done: int) -> bool:
        """Returns whether a run may stop and resume after some steps."""
        ...

    def sync(self) -> None:
        """Flushes what was recorded to the disk, before a checkpoint."""

    def close(self) -> None:
        """Ends threads and closes files."""


class DataBatches:
    """Batches of data, which threads read ahead."""

    def __init__(self, trainers: Sequence[Trainer], meters: Sequence[Meter], done: int):
        self._stream = stream_members(trainers, done)
        self._batches: Iterator[MemberBatches] = self._stream
        for meter in meters:
            self._batches = meter.waiting(self._batches)

    def next(
        self, states: Sequence[TrainState], done: int
    ) -> tuple[MemberBatches, dict[str, float]]:
        """Returns the next batch; see `BatchSource`."""
        del states, done
        return next(self._batches), {}

    @property
    def reason(self) -> str | None:
        """Returns None: data do not end a run."""
        return None

    def between(self, done: int) -> bool:
        """Returns True: every step has its own batch."""
        del done
        return True

    def sync(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Ends the threads."""
        self._stream.close()


class RolloutBatches:
    """Batches of answers that the model samples before a step.

    Raises:
      InputError: if there are several processes.
    """

    def __init__(self, trainer: Trainer, meter: Meter, done: int):
        if processes.count() > 1:
            raise InputError(
                "Run.rollouts samples in one process: start the command once"
            )
        assert isinstance(trainer.examples, RolloutPrompts)
        self._trainer, self._meter = trainer, meter
        self._stream = RolloutStream(
            trainer.model,
            trainer.frozen | trainer.start.trained,
            trainer.examples,
            trainer.batch_plan,
            Path(trainer.run.directory),
            done,
            trainer.run.seed,
        )

    @property
    def reason(self) -> str | None:
        """Why the run stops before its last step; see `RolloutStream`."""
        return self._stream.reason

    def next(
        self, states: Sequence[TrainState], done: int
    ) -> tuple[MemberBatches, dict[str, float]]:
        """Samples the batch of a step; see `BatchSource`."""
        (state,) = states
        # The step before ends first, so that its time counts as that of training.
        trained: Any = jax.block_until_ready(state.trained)
        with self._meter.stopped():
            # The step donates its state.
            copied = jax.tree.map(lambda leaf: leaf.copy(), trained)
            parameters = self._trainer.frozen | copied
            batch, metrics = self._stream.batch(parameters, done)
        return MemberBatches(batch, (batch,)), metrics

    def between(self, done: int) -> bool:
        """Returns whether the next step begins with new answers."""
        return self._stream.between(done)

    def sync(self) -> None:
        """Flushes the answers to the disk."""
        self._stream.log.sync()

    def close(self) -> None:
        """Closes the file of answers."""
        self._stream.log.close()


def open_batches(
    trainers: Sequence[Trainer], meters: Sequence[Meter], done: int
) -> BatchSource:
    """Opens the batches of members that step together.

    Args:
      trainers: the members.
      meters: meter of each, which measures the time of training.
      done: number of completed steps.
    """
    if trainers[0].run.rollouts is None:
        return DataBatches(trainers, meters, done)
    return RolloutBatches(trainers[0], meters[0], done)
