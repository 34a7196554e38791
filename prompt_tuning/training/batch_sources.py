"""Sources of a loop's batches: data, or the model's own answers."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import jax

from prompt_tuning import processes
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError
from prompt_tuning.training.member_batches import (
    MemberBatches,
    join_members,
    stream_members,
)
from prompt_tuning.training.rollouts.answer_sampler import open_draws
from prompt_tuning.training.rollouts.prompt_table import RolloutPrompts
from prompt_tuning.training.rollouts.rollout_stream import Metrics, RolloutStream
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.throughput import Meter
from prompt_tuning.training.trainer import Trainer


@runtime_checkable
class BatchSource(Protocol):
    """Provides the batch of each step."""

    @property
    def reason(self) -> str | None:
        """The reason for stopping before the last step; None to continue."""
        ...

    def next(
        self, states: Sequence[TrainState], done: int
    ) -> tuple[MemberBatches, Sequence[Metrics]]:
        """Returns the next step's batches, and each member's metrics of them."""
        ...

    def between(self, done: int) -> bool:
        """Whether a run may stop and resume after `done` steps."""
        ...

    def drop(self, member: int) -> None:
        """Stops making batches for a member."""

    def sync(self) -> None:
        """Flushes logs to disk before a checkpoint."""

    def close(self) -> None:
        """Ends threads and closes files."""


class DataBatches:
    """Batches of data, read ahead by threads."""

    def __init__(self, trainers: Sequence[Trainer], meters: Sequence[Meter], done: int):
        self._stream, self._count = stream_members(trainers, done), len(trainers)
        self._batches: Iterator[MemberBatches] = self._stream
        for meter in meters:
            self._batches = meter.waiting(self._batches)

    def next(
        self, states: Sequence[TrainState], done: int
    ) -> tuple[MemberBatches, Sequence[Metrics]]:
        """Returns the next batch; see `BatchSource`."""
        del states, done
        return next(self._batches), [{}] * self._count

    @property
    def reason(self) -> str | None:
        """Returns None: data never end a run."""
        return None

    def between(self, done: int) -> bool:
        """Returns True: every step has its own batch."""
        del done
        return True

    def drop(self, member: int) -> None:
        """Does nothing: members share the batches."""

    def sync(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Ends the threads."""
        self._stream.close()


class RolloutBatches:
    """Batches of answers that each member samples before a step.

    Raises:
      InputError: if there is more than one process.
    """

    def __init__(
        self,
        trainers: Sequence[Trainer],
        meters: Sequence[Meter],
        done: int,
        live: Sequence[int] | None = None,
    ):
        if processes.count() > 1:
            raise InputError(
                "Run.rollouts samples in one process: start the command once"
            )
        self._trainers, self._meters = trainers, meters
        longest = max(trainers, key=lambda trainer: trainer.model.prompt_length)
        assert isinstance(longest.examples, RolloutPrompts)
        # All members sample with one engine, one after the other.
        draws = open_draws(
            longest.model,
            longest.frozen | longest.start.trained,
            longest.examples,
            len(longest.batch_plan.batch(0).rows),
        )
        self._streams = {
            k: RolloutStream(
                trainers[k].model,
                draws,
                longest.examples,
                trainers[k].batch_plan,
                Path(trainers[k].run.directory),
                done,
                trainers[k].run.seed,
            )
            for k in (range(len(trainers)) if live is None else live)
        }

    @property
    def reason(self) -> str | None:
        """The reason for stopping before the last step, if all members have one."""
        reasons = [stream.reason for stream in self._streams.values()]
        return reasons[0] if reasons and all(reasons) else None

    def next(
        self, states: Sequence[TrainState], done: int
    ) -> tuple[MemberBatches, Sequence[Metrics]]:
        """Samples the batches of a step; see `BatchSource`."""
        # Wait for the previous step, so that its time counts as training.
        jax.block_until_ready([state.trained for state in states])
        batches: dict[int, Batch] = {}
        metrics: list[Metrics] = [{} for _ in states]
        with contextlib.ExitStack() as pauses:
            for meter in self._meters:
                pauses.enter_context(meter.stopped())
            for k, stream in self._streams.items():
                # The step donates its state.
                copied = jax.tree.map(lambda leaf: leaf.copy(), states[k].trained)
                parameters = self._trainers[k].frozen | copied
                batches[k], metrics[k] = stream.batch(parameters, done)
        # A dropped member's batch does not matter.
        some = next(iter(batches.values()))
        filled = [batches.get(k, some) for k in range(len(states))]
        return join_members(filled, self._trainers[0].model.config.pad_id), metrics

    def between(self, done: int) -> bool:
        """Whether the next step starts with new answers."""
        return all(stream.between(done) for stream in self._streams.values())

    def drop(self, member: int) -> None:
        """Stops sampling for a member."""
        self._streams.pop(member).log.close()

    def sync(self) -> None:
        """Flushes the answers to the disk."""
        for stream in self._streams.values():
            stream.log.sync()

    def close(self) -> None:
        """Closes the files of answers."""
        for stream in self._streams.values():
            stream.log.close()


def open_batches(
    trainers: Sequence[Trainer],
    meters: Sequence[Meter],
    done: int,
    live: Sequence[int] | None = None,
) -> BatchSource:
    """Opens the batches of members that step together."""
    if trainers[0].run.rollouts is None:
        return DataBatches(trainers, meters, done)
    return RolloutBatches(trainers, meters, done, live)
