"""The gradient of a training step, computed by a pipeline of stages.

Each stage has devices, programs and a thread of its own, which runs its operations in
the order of the schedule. The arguments and results are whole arrays, so nothing else
of a training step knows about stages.
"""

import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.losses.objective import LossSums, Objective
from prompt_tuning.losses.token_objective import NATS_PER_WEIGHT
from prompt_tuning.models.scoring import merge_model
from prompt_tuning.pipeline.compiled_stages import CompiledStages
from prompt_tuning.pipeline.stage_devices import StageDevices
from prompt_tuning.pipeline.stage_worker import StageWorker
from prompt_tuning.pipeline.transport import StoppedError

Orders = Sequence[Sequence[Any]]
"""The operations of each stage in order, with their `kind` and `microbatch`."""


class PipelinedGradients:
    """`training.step.gradients`, computed by the stages of a pipeline.

    Attributes:
      peak_bytes: most bytes that each stage held from one operation to another in the
        last step, on each of its devices.
    """

    def __init__(
        self,
        graph: nnx.GraphDef,
        stages: Sequence[StageDevices],
        layers: Sequence[int],
        orders: Callable[[int, bool], Orders],
        objective: Objective = NATS_PER_WEIGHT,
        abstract: Mapping[str, jax.ShapeDtypeStruct] | None = None,
    ):
        """Sets the pipeline up; nothing is traced yet.

        Args:
          graph: the model's structure.
          stages: the devices of each stage.
          layers: number of blocks of each stage.
          orders: returns the operations of each stage, given the number of
            micro-batches and whether a prefix crosses the stages.
          objective: the training objective.
          abstract: shapes of all parameters, if the given ones are padded.
        """
        self._abstract = abstract
        self._graph, self._stages, self._layers = graph, list(stages), list(layers)
        self._orders, self._objective = orders, objective
        self._compiled: dict[Any, CompiledStages] = {}
        self._share = jax.jit(lambda batch: 1 / jnp.asarray(objective.divisor(batch)))
        self._penalty_gradient = jax.jit(jax.grad(self._penalty))
        self._frozen: Parameters | None = None
        self.peak_bytes: list[int] = []

    def __call__(
        self,
        trained: Parameters,
        frozen: Parameters,
        batch: Batch,
        key: jax.Array | None,
    ) -> tuple[Parameters, LossSums]:
        """Computes the gradient of a batch's loss; see `training.step.gradients`.

        Args:
          trained: parameters to differentiate.
          frozen: all other parameters; they are placed on the stages once.
          batch: one batch, or micro-batches on a leading axis.
          key: dropout key; None without dropout.
        """
        micro_batches, indices = _micro_batches(batch)
        first = (micro_batches[0], key, indices[0])
        stages = self._stages_for(trained, frozen, first)
        if self._frozen is not frozen:
            stages.place_frozen(frozen)
            self._frozen = frozen
        share = self._share(batch)
        others = [
            jax.tree.leaves((rows, key, index))
            for rows, index in zip(micro_batches, indices, strict=True)
        ]
        workers = stages.workers(trained, others, jax.tree.leaves(key), share)
        orders = self._orders(len(micro_batches), stages.model.prefix is not None)
        run_in_threads(workers, orders)
        self.peak_bytes = [worker.peak_bytes for worker in workers]
        gradient, sums = stages.collect(trained, workers)
        if merge_model(self._graph, trained | frozen).has_penalty:
            penalty = self._penalty_gradient(trained, frozen)
            gradient = jax.tree.map(jnp.add, gradient, penalty)
        return gradient, sums

    def _penalty(self, trained: Parameters, frozen: Parameters) -> jax.Array:
        return merge_model(self._graph, trained | frozen).penalty()

    def _stages_for(
        self, trained: Parameters, frozen: Parameters, others: tuple
    ) -> CompiledStages:
        """Returns the stages for the shape of a micro-batch."""
        shapes = tuple(x.shape for x in jax.tree.leaves(others))
        if shapes not in self._compiled:
            whole = self._abstract or jax.eval_shape(lambda: trained | frozen)
            self._compiled[shapes] = CompiledStages(
                self._graph,
                self._objective,
                self._stages,
                self._layers,
                (trained, whole),
                others,
            )
            self._frozen = None
        return self._compiled[shapes]


def _micro_batches(batch: Batch) -> tuple[list[Batch], list[Any]]:
    """Returns the micro-batches and their numbers."""
    if batch.tokens.ndim == 2:
        # A batch without micro-batches draws its dropout masks from the step's key.
        return [batch], [None]
    return _split(batch), [np.int32(i) for i in range(len(batch.tokens))]


@jax.jit
def _split(batch: Batch) -> list[Batch]:
    """Splits a batch along its first axis, micro-batches."""
    count = len(batch.tokens)
    return [jax.tree.map(operator.itemgetter(i), batch) for i in range(count)]


def run_in_threads(workers: Sequence[StageWorker], orders: Orders) -> None:
    """Runs each stage in a thread.

    Raises:
      Exception: the first that a stage raised; no thread runs any more then.
    """
    failures: list[BaseException] = []

    def work(stage: int) -> None:
        try:
            for operation in orders[stage]:
                workers[stage].run(operation.kind, operation.microbatch)
            workers[stage].wait()
        except StoppedError:
            return
        except BaseException as error:
            failures.append(error)
            for worker in workers:
                worker.stop()

    threads = [
        threading.Thread(target=work, args=(stage,), name=f"stage {stage}", daemon=True)
        for stage in range(len(workers))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
