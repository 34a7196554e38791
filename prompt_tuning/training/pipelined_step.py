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
from prompt_tuning.pipeline.driver import PipelinedGradients, StepInStages
from prompt_tuning.pipeline.pipeline_plan import PipelinePlan
from prompt_tuning.pipeline.schedules import Order, stage_orders
from prompt_tuning.pipeline.stage_devices import StageDevices
from prompt_tuning.pipeline.stage_parameters import FrozenParts
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
        gradients: PipelinedGradients,
        graph: nnx.GraphDef,
        optimizer: optax.GradientTransformation,
        plan: PipelinePlan,
        *,
        placement: Placement,
        dropout: bool,
        objective: Objective = NATS_PER_WEIGHT,
    ):
        """Sets the step up; nothing is compiled yet.

        Args:
          gradients: the model in stages.
          graph: the model's structure.
          optimizer: optimizer of the trained parameters.
          plan: blocks and schedule of the stages.
          placement: the shardings of the whole arrays.
          dropout: whether dropout is active.
          objective: the training objective.
        """
        self._gradients, self._placement = gradients, placement
        self._dropout = dropout
        self.plan = plan
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
        step = self.begin(state, frozen, batch)
        if batch.tokens.shape in self._shapes:
            self._gradients.run(step)
        else:
            self._shapes.add(batch.tokens.shape)
            with activity(f"compiling the stages ({batch.describe()})"):
                self._gradients.run(step)
        return self.finish(state, batch, step)

    def begin(
        self, state: TrainState, frozen: Parameters, batch: Batch
    ) -> StepInStages:
        """Places the arrays of a step on the stages; the arguments are a call's."""
        parts = divide_rows(batch, self.plan.microbatches)
        key = step_key(state, self._dropout)
        return self._gradients.begin(state.trained, frozen, parts, key)

    def finish(
        self, state: TrainState, batch: Batch, step: StepInStages
    ) -> tuple[TrainState, Metrics]:
        """Updates the parameters after the stages have computed; donates `state`.

        Args:
          state: the state before the step.
          batch: the batch that `begin` was given.
          step: its result.
        """
        gradient, sums = self._gradients.finish(step)
        batch = self._placement.put_tree(batch)
        return self._finished(state, step.frozen, gradient, batch, sums)


def pipelined_gradients(
    graph: nnx.GraphDef,
    stages: Sequence[StageDevices],
    plan: PipelinePlan,
    placement: Placement,
    objective: Objective,
    placed: FrozenParts | None = None,
    *,
    joined_p2: bool = False,
) -> PipelinedGradients:
    """Returns a model in the stages of a plan; nothing is traced yet.

    Args:
      graph: the model's structure.
      stages: the devices of each stage.
      plan: blocks and schedule of the stages.
      placement: the shardings of the whole arrays.
      objective: the training objective.
      placed: frozen parameters on the stages, which several pipelines may share.
      joined_p2: see `Pipeline`.
    """

    def orders(count: int, prefix: bool) -> tuple[Order, ...]:
        return stage_orders(
            plan.schedule,
            plan.stages,
            count,
            plan.two_stage,
            prefix=prefix,
            virtual=plan.virtual,
        )

    return PipelinedGradients(
        graph,
        stages,
        plan.layers,
        orders,
        objective,
        placement.abstract,
        placed,
        joined_p2,
    )


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
    grid = mesh.build().devices
    inner = mesh.within_stage(grid.size)
    rules = mesh.rules or AxisRules()
    stages = []
    for devices in grid:
        flat = devices.ravel().tolist()
        own = sorted({device.process_index for device in flat})
        if len(own) > 1:
            raise InputError(
                f"MeshShape.stage is {mesh.stage}, with {len(flat)} devices in each "
                f"stage, but each of the {processes.count()} processes has "
                f"{jax.local_device_count()}: stage {len(stages)} would be divided "
                f"among processes {', '.join(map(str, own))}; set stage to a multiple "
                f"of {processes.count()}"
            )
        layout = None
        if len(flat) > 1:
            layout = MeshLayout(inner.build(flat), rules, config)
        stages.append(StageDevices(flat[0], layout))
    return stages
