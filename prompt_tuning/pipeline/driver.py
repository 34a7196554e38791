"""Computes the gradient of a training step with a pipeline of stages.

Each stage has devices, programs and a thread that runs its operations in the order of
the schedule. Arguments and results are whole arrays, so the rest of a training step
needs no code for stages.
"""

import dataclasses
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from prompt_tuning import processes
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.core.status_line import status
from prompt_tuning.losses.objective import LossSums, Objective
from prompt_tuning.losses.token_objective import NATS_PER_WEIGHT
from prompt_tuning.pipeline.compiled_stages import CompiledStages
from prompt_tuning.pipeline.schedules import Order, join_end
from prompt_tuning.pipeline.stage_devices import StageDevices
from prompt_tuning.pipeline.stage_joins import FrozenParts
from prompt_tuning.pipeline.stage_worker import StageWorker
from prompt_tuning.pipeline.transport import StoppedError, process_links

Orders = Sequence[Order]
"""The operations of each stage in order."""


class PipelinedGradients:
    """`training.gradients.objective_gradient`, computed by the stages of a pipeline.

    With virtual stages, a stage has many chunks of blocks, each compiled and with its
    own worker; the stage's thread runs the operations of all its chunks.

    Attributes:
      peak_bytes: most bytes that each stage held between operations in the last step,
        on each of its devices; 0 for stages of other processes.
    """

    def __init__(
        self,
        graph: nnx.GraphDef,
        stages: Sequence[StageDevices],
        layers: Sequence[int],
        orders: Callable[[int, bool], Orders],
        objective: Objective = NATS_PER_WEIGHT,
        abstract: Mapping[str, jax.ShapeDtypeStruct] | None = None,
        placed: FrozenParts | None = None,
        joined_p2: bool = False,
        microbatches: int | None = None,
    ):
        """Sets the pipeline up; nothing is traced yet.

        Args:
          graph: the model's structure.
          stages: the devices of each stage.
          layers: number of blocks of each stage; with virtual stages of each chunk, in
            the order of the model: first every stage's first chunk, then the second
            ones.
          orders: returns the operations of each stage, given the number of
            micro-batches and whether a prefix crosses the stages.
          objective: the training objective.
          abstract: shapes of all parameters, if the given ones are padded.
          placed: frozen parameters on the stages, which pipelines may share.
          joined_p2: whether the weight gradients left at the end are one product for
            all micro-batches.
          microbatches: number of micro-batches to divide a batch into; None to keep its
            own.
        """
        self._joined_p2, self._microbatches = joined_p2, microbatches
        self._abstract = abstract
        self._graph, self._layers = graph, list(layers)
        # The devices of each chunk, in the order of the model.
        self._stages = list(stages) * (len(layers) // len(stages))
        self._in_one_process = all(stage.is_local for stage in stages)
        self._orders, self._objective = orders, objective
        self._compiled: dict[Any, CompiledStages] = {}
        self._share = jax.jit(lambda batch: 1 / jnp.asarray(objective.divisor(batch)))
        self._placed = FrozenParts() if placed is None else placed
        self.peak_bytes: list[int] = []
        self._run_before: set[tuple[int, ...]] = set()

    def __call__(
        self,
        trained: Parameters,
        frozen: Parameters,
        batch: Batch,
        key: jax.Array | None,
    ) -> tuple[Parameters, LossSums]:
        """Computes the gradient of a batch's loss, without the prompt's penalty.

        `batch` may have micro-batches on a leading axis. The frozen parameters are
        placed on the stages only once. A `key` of None disables dropout.
        """
        step = self.begin(trained, frozen, batch, key)
        if batch.tokens.shape in self._run_before:
            self.run(step)
        else:
            self._run_before.add(batch.tokens.shape)
            with status(f"compiling the stages ({batch.describe()})"):
                self.run(step)
        return self.finish(step)

    def run(self, step: "StepInStages") -> None:
        """Runs the operations of a step in the order of the schedule."""
        orders = self._orders(step.count, step.prefix)
        if self._joined_p2:
            orders = self._joined(step, orders)
        run_in_threads(step.workers, orders)
        if not self._in_one_process:
            # A process gives the others no arrays while all threads of its CPU devices
            # wait in a collective, so all must have theirs before the first one.
            processes.wait_for_all()
        first = step.workers[: len(orders)]
        self.peak_bytes = [0 if w is None else w.memory.peak for w in first]

    def _joined(self, step: "StepInStages", orders: Orders) -> Orders:
        """Joins the last weight gradients of each stage into one operation."""
        joined = []
        for stage, worker in enumerate(step.workers):
            order, count = join_end(tuple(orders[stage]))
            joined.append(order)
            if worker is not None and count > 1:
                batch, key, index = step.others
                larger = jax.tree.map(
                    lambda x, n=count: jax.ShapeDtypeStruct(
                        (n * x.shape[0], *x.shape[1:]), x.dtype
                    ),
                    batch,
                )
                trained, frozen = step.trained, step.frozen
                programs = self._stages_for(trained, frozen, (larger, key, index))
                worker.joined_gradient = step.stages.joined_gradient(
                    stage, programs, count
                )
        return joined

    def begin(
        self,
        trained: Parameters,
        frozen: Parameters,
        batch: Batch,
        key: jax.Array | None,
    ) -> "StepInStages":
        """Places a step's arrays on the stages; takes the arguments of a call."""
        batch = self._divided(batch)
        micro_batches, indices = _micro_batches(batch)
        stages = self.traced(trained, frozen, batch, key)
        stages.place_frozen(frozen, self._placed)
        others = [
            jax.tree.leaves((rows, key, index))
            for rows, index in zip(micro_batches, indices, strict=True)
        ]
        share = self._share(batch)
        links = None  # to other processes, if any
        if not self._in_one_process:
            links = process_links().next_step(self._stages)
        workers = stages.workers(trained, others, jax.tree.leaves(key), share, links)
        first = (micro_batches[0], key, indices[0])
        count = len(micro_batches)
        return StepInStages(stages, trained, frozen, workers, count, first)

    def finish(self, step: "StepInStages") -> tuple[Parameters, LossSums]:
        """Returns the gradient and the sums of a step that has run."""
        return step.stages.collect(step.trained, step.workers)

    def traced(
        self,
        trained: Mapping[str, Any],
        frozen: Mapping[str, Any],
        batch: Batch,
        key: jax.Array | None,
    ) -> CompiledStages:
        """Traces the stages for a batch without running them.

        Takes the arguments of a call; parameters may be given as shapes.
        """
        micro_batches, indices = _micro_batches(self._divided(batch))
        return self._stages_for(trained, frozen, (micro_batches[0], key, indices[0]))

    def _divided(self, batch: Batch) -> Batch:
        if self._microbatches is None:
            return batch
        return divide_rows(batch, self._microbatches)

    def _stages_for(
        self, trained: Mapping[str, Any], frozen: Mapping[str, Any], others: tuple
    ) -> CompiledStages:
        shapes = tuple(x.shape for x in jax.tree.leaves(others))
        if shapes not in self._compiled:
            whole = self._abstract or jax.eval_shape(lambda: {**trained, **frozen})
            self._compiled[shapes] = CompiledStages(
                self._graph,
                self._objective,
                self._stages,
                self._layers,
                (trained, whole),
                others,
            )
        return self._compiled[shapes]


def divide_rows(batch: Batch, microbatches: int) -> Batch:
    """Divides a batch, or its micro-batches, into more micro-batches of fewer rows.

    Raises:
      InputError: if the rows cannot be divided.
    """
    leading = batch.tokens.shape[:-1]  # (B,) or (A, B)
    present = 1 if len(leading) == 1 else leading[0]
    if present == microbatches:
        return batch
    rows = leading[-1]
    if microbatches % present or rows % (microbatches // present):
        raise InputError(
            f"a step has {present} x {rows} rows, which cannot be divided among "
            f"{microbatches} micro-batches: set Pipeline.microbatches or "
            "DataSource.batch_size to another number"
        )

    def divide(leaf: jax.Array) -> jax.Array:
        size = leaf.shape[len(leading) - 1] * present // microbatches
        return jnp.reshape(leaf, (microbatches, size, *leaf.shape[len(leading) :]))

    return jax.tree.map(divide, batch)


@dataclasses.dataclass(frozen=True)
class StepInStages:
    """One step with its arrays on the stages.

    Attributes:
      stages: the compiled stages.
      trained: the trained parameters.
      frozen: all other parameters.
      workers: run the operations, one per chunk; None for stages of other processes.
      count: number of micro-batches.
      others: the first micro-batch, the dropout key and the micro-batch's index.
    """

    stages: CompiledStages
    trained: Parameters
    frozen: Parameters
    workers: Sequence[StageWorker | None]
    count: int
    others: tuple

    @property
    def prefix(self) -> bool:
        """Whether a prompt that all rows share crosses the stages."""
        return self.stages.model.prefix is not None


def _micro_batches(batch: Batch) -> tuple[list[Batch], list[Any]]:
    if batch.tokens.ndim == 2:
        # A batch without micro-batches draws its dropout masks from the step's key.
        return [batch], [None]
    return _split(batch), [np.int32(i) for i in range(len(batch.tokens))]


@jax.jit
def _split(batch: Batch) -> list[Batch]:
    """Splits a batch along its first axis, micro-batches."""
    count = len(batch.tokens)
    return [jax.tree.map(operator.itemgetter(i), batch) for i in range(count)]


def run_in_threads(workers: Sequence[StageWorker | None], orders: Orders) -> None:
    """Runs each stage of this process in a thread.

    `workers` has one per chunk, in the order of the model.

    Raises:
      Exception: the first one that a stage raised; by then all threads have ended.
    """
    failures: list[BaseException] = []
    local = {place: w for place, w in enumerate(workers) if w is not None}
    stages = len(orders)

    def work(stage: int) -> None:
        try:
            for kind, microbatch, chunk in orders[stage]:
                local[chunk * stages + stage].run(kind, microbatch)
            for place in range(stage, len(workers), stages):
                local[place].wait()
        except StoppedError:
            return
        except BaseException as error:
            failures.append(error)
            for worker in local.values():
                worker.stop()

    threads = [
        threading.Thread(target=work, args=(stage,), name=f"stage {stage}", daemon=True)
        for stage in range(stages)
        if stage in local
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
