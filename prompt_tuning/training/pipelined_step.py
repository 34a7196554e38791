"""A training step with a gradient from the stages of a pipeline."""

from typing import Any

import jax

from prompt_tuning import processes
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.losses.objective import Objective
from prompt_tuning.pipeline.driver import PipelinedGradients
from prompt_tuning.pipeline.pipeline_plan import PipelinePlan
from prompt_tuning.pipeline.schedules import Order, stage_orders
from prompt_tuning.pipeline.stage_devices import StageDevices
from prompt_tuning.pipeline.stage_joins import FrozenParts
from prompt_tuning.settings.axis_rules import AxisRules
from prompt_tuning.settings.mesh_shape import MeshShape
from prompt_tuning.sharding.mesh import build_mesh
from prompt_tuning.sharding.mesh_layout import MeshLayout
from prompt_tuning.training.run_plan import RunPlan
from prompt_tuning.training.step import Finish, compile_finish


def pipelined_gradients(
    plan: RunPlan,
    objective: Objective,
    stages: PipelinePlan,
    placed: FrozenParts | None = None,
) -> PipelinedGradients:
    """Splits a run's model into stages; nothing is traced yet.

    Pipelines can share the `placed` frozen parameters.
    """
    run, model = plan.run, plan.model
    assert run.mesh is not None and model.placement is not None
    assert run.pipeline is not None

    def orders(count: int, prefix: bool) -> tuple[Order, ...]:
        return stage_orders(
            stages.schedule,
            stages.stages,
            count,
            stages.two_stage,
            prefix=prefix,
            virtual=stages.virtual,
        )

    return PipelinedGradients(
        model.graph,
        stage_devices(run.mesh, model.config),
        stages.layers,
        orders,
        objective,
        model.placement.abstract,
        placed,
        run.pipeline.joined_p2,
        stages.microbatches,
    )


def pipelined_finish(plan: RunPlan, objective: Objective) -> Finish:
    """Compiles `finish` for a run in stages.

    The state and the frozen parameters are whole arrays, sharded over the devices of
    all stages. Each stage also has a copy of its blocks' frozen parameters, and gets
    their trained ones in each step.
    """
    placement = plan.model.placement
    assert placement is not None
    compiled = compile_finish(
        graph=plan.model.graph,
        optimizer=plan.optimizer,
        objective=objective,
        placement=placement,
    )

    def finish(state: Any, frozen: Any, gradient: Any, batch: Any, sums: Any) -> Any:
        return compiled(state, frozen, gradient, placement.put_tree(batch), sums)

    return finish


def stage_devices(mesh: MeshShape, config: ModelConfig) -> list[StageDevices]:
    """Returns the devices of each stage of a mesh.

    Raises:
      InputError: if the devices do not fit the mesh, or the model cannot be split
        within a stage.
    """
    grid = build_mesh(mesh).devices
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
            layout = MeshLayout(build_mesh(inner, flat), rules, config)
        stages.append(StageDevices(flat[0], layout))
    return stages
