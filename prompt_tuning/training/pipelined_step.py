"""A training step whose gradient the stages of a pipeline compute."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from prompt_tuning import processes
from prompt_tuning.core.activity import activity
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.losses.objective import LossSums, Objective
from prompt_tuning.losses.token_objective import NATS_PER_WEIGHT
from prompt_tuning.pipeline.driver import PipelinedGradients
from prompt_tuning.pipeline.pipeline_plan import PipelinePlan
from prompt_tuning.pipeline.pipeline_settings import Pipeline
from prompt_tuning.pipeline.schedules import Order, stage_orders
from prompt_tuning.pipeline.stage_devices import StageDevices
from prompt_tuning.sharding.array_placement import Placement
from prompt_tuning.sharding.axis_rules import AxisRules
from prompt_tuning.sharding.mesh import MeshShape
from prompt_tuning.sharding.mesh_layout import MeshLayout
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step import Metrics, batch_metrics, step_key, update


class PipelinedStep:
    """`train_step` with the gradient of a pipeline.

    The state and the frozen parameters are whole arrays, sharded over the devices of
    all stages. Each stage has a copy of the frozen parameters of its own blocks, and
    gets the trained ones in each step.

    Attributes:
      plan: blocks and schedule of the stages.
    """

    def __init__(
        self,
        graph: nnx.GraphDef,
        optimizer: optax.GradientTransformation,
        stages: Sequence[StageDevices],
        plan: PipelinePlan,
        *,
        placement: Placement,
        dropout: bool,
        objective: Objective = NATS_PER_WEIGHT,
    ):
        """Sets the step up; nothing is compiled yet.

        Args:
          graph: the model's structure.
          optimizer: optimizer of the trained parameters.
          stages: the devices of each stage.
          plan: blocks and schedule of the stages.
          placement: the shardings of the whole arrays.
          dropout: whether dropout is active.
          objective: the training objective.
        """
        self._graph, self._placement, self._dropout = graph, placement, dropout
        self.plan = plan

        def orders(count: int, prefix: bool) -> tuple[Order, ...]:
            return stage_orders(
                plan.schedule, plan.stages, count, plan.two_stage, prefix=prefix
            )

        self._gradients = PipelinedGradients(
            graph, stages, plan.layers, orders, objective, placement.abstract
        )
        finish = functools.partial(
            _finish,
            graph=graph,
            optimizer=optimizer,
            objective=objective,
            placement=placement,
        )
        self._finished = jax.jit(finish, donate_argnums=0)
        self._shapes: set[tuple[int, ...]] = set()

    def __call__(
        self, state: TrainState, frozen: Parameters, batch: Batch
    ) -> tuple[TrainState, Metrics]:
        """Computes one step; donates `state`.

        Args:
          state: the state before the step.
          frozen: frozen parameters.
          batch: one batch, or micro-batches on a leading axis.

        Returns:
          the next state, and the metrics of `train_step`.
        """
        key = step_key(state, self._dropout)
        if batch.tokens.shape in self._shapes:
            gradient, sums = self._gradient(state, frozen, batch, key)
        else:
            self._shapes.add(batch.tokens.shape)
            with activity(f"compiling the stages ({batch.describe()})"):
                gradient, sums = self._gradient(state, frozen, batch, key)
        batch = jax.device_put(batch, self._placement.layout.replicated)
        return self._finished(state, frozen, gradient, batch, sums)

    def _gradient(
        self, state: TrainState, frozen: Parameters, batch: Batch, key: jax.Array | None
    ) -> tuple[Parameters, LossSums]:
        parts = divide_rows(batch, self.plan.microbatches)
        return self._gradients(state.trained, frozen, parts, key)


def _finish(
    state: TrainState,
    frozen: Parameters,
    gradient: Parameters,
    batch: Batch,
    sums: LossSums,
    *,
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    objective: Objective,
    placement: Placement,
) -> tuple[TrainState, Metrics]:
    """Computes metrics and updates; runs no block."""
    parameters = state.trained | frozen
    metrics = batch_metrics(graph, parameters, batch, sums, objective)
    return update(state, gradient, metrics, optimizer, placement)


def divide_rows(batch: Batch, microbatches: int) -> Batch:
    """Divides a batch, or its micro-batches, into more micro-batches of fewer rows.

    Args:
      batch: one batch, or micro-batches on a leading axis.
      microbatches: number of micro-batches.

    Raises:
      InputError: if the rows cannot be divided.
    """
    leading = batch.tokens.shape[:-1]  # (B,) or (A, B)
    given = 1 if len(leading) == 1 else leading[0]
    if given == microbatches:
        return batch
    rows = leading[-1]
    if microbatches % given or rows % (microbatches // given):
        raise InputError(
            f"a step has {given} x {rows} rows, which cannot be divided among "
            f"{microbatches} micro-batches: set Pipeline.microbatches or "
            "DataSource.batch_size to another number"
        )

    def divide(leaf: jax.Array) -> jax.Array:
        own = leaf.shape[len(leading) - 1] * given // microbatches
        return jnp.reshape(leaf, (microbatches, own, *leaf.shape[len(leading) :]))

    return jax.tree.map(divide, batch)


def stage_devices(mesh: MeshShape, config: ModelConfig) -> list[StageDevices]:
    """Returns the devices of each stage of a mesh.

    Raises:
      InputError: if the devices do not fit the mesh, or the model cannot be divided
        within a stage.
    """
    if processes.count() > 1:
        raise InputError(
            f"MeshShape.stage is {mesh.stage}, but {processes.count()} processes run "
            "the command: the stages of a pipeline must be devices of one process yet; "
            "use fsdp or tensor between processes"
        )
    grid = mesh.build().devices
    inner = mesh.within_stage(grid.size)
    rules = mesh.rules or AxisRules()
    stages = []
    for devices in grid:
        flat = devices.ravel().tolist()
        layout = None
        if len(flat) > 1:
            layout = MeshLayout(inner.build(flat), rules, config)
        stages.append(StageDevices(flat[0], layout))
    return stages


def check_supported(settings: Pipeline, config: ModelConfig) -> None:
    """Refuses what stages cannot compute yet, before any weight is read.

    Raises:
      InputError: with what to set.
    """
    if settings.joined_p2:
        raise InputError(
            "Pipeline.joined_p2 is True, but the weights' gradients of several "
            "micro-batches cannot be computed as one product yet: set it to False"
        )
    for policy in (config.rematerialization, config.encoder_policy):
        if not policy.alike:
            raise InputError(
                f"Rematerialization skips {policy.skip_first} blocks at the start and "
                f"{policy.skip_last} at the end, wraps every {policy.every} and has "
                f"{len(policy.ranges)} ranges, but in a pipeline all blocks of a stack "
                "are computed alike: set skip_first and skip_last to 0, every to 1 and "
                "ranges to ()"
            )
