"""Set up a run's pipeline from the shapes of its data and model."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from prompt_tuning.config.run import Run
from prompt_tuning.core.batch import RowDivision
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.layer_kinds import check_alike
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import logical_axes, merge
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.data.batching.batch_plan import BatchPlan, PlannedBatch
from prompt_tuning.data.model_interface import ModelInterface
from prompt_tuning.pipeline.operation_counts import MicroBatchShape, count_work
from prompt_tuning.pipeline.pipeline_plan import (
    PipelinePlan,
    check_blocks,
    plan_pipeline,
)
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.settings.axis_rules import AxisRules
from prompt_tuning.sharding.array_placement import Placement
from prompt_tuning.sharding.mesh import build_mesh
from prompt_tuning.sharding.mesh_layout import MeshLayout


def check_division(run: Run, config: ModelConfig) -> None:
    """Checks that a model's blocks can be split among the run's stages, if any."""
    if run.pipeline is None:
        return
    if config.labels:
        raise InputError(
            "Run.pipeline is set, but a class head needs all layers on each device: "
            "leave one of them out, or give MeshShape other axes than stage"
        )
    check_alike(config, "Run.pipeline is set", "leave the pipeline out")
    blocks = config.encoder_layers + config.layers
    check_blocks(run.pipeline.layers, run.stages, blocks, run.pipeline.virtual)
    count = run.pipeline.count(run.accumulate)
    embeds = run.objective is not None and run.objective.embeds is not None
    if embeds and count != run.accumulate:
        raise InputError(
            f"Pipeline.microbatches is {count} and Run.accumulate is {run.accumulate}, "
            f"but a query of a {type(run.objective).__name__} would be compared with "
            "the texts of its micro-batch alone, and the loss be another one: leave "
            "microbatches out, or set accumulate to the same"
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


def stage_placement(run: Run, model: PromptedModel) -> Placement:
    """Returns the placement of a model on the devices of the first stage.

    Raises:
      InputError: if the run has no mesh, or the model cannot be split.
    """
    if run.mesh is None:
        raise InputError("a run in stages needs a mesh: set Run.mesh to @MeshShape()")
    grid = build_mesh(run.mesh).devices
    mesh = build_mesh(run.mesh.within_stage(grid.size), grid[0].ravel().tolist())
    layout = MeshLayout(mesh, run.mesh.rules or AxisRules(), model.config)
    return Placement.create(layout, model.graph, model.plan.abstract)


def training_interface(run: Run, model: PromptedModel) -> ModelInterface:
    """Returns the properties of a model that determine how a run's data is read.

    In a pipeline, only the devices of one stage share the rows of a micro-batch.

    Raises:
      InputError: if the model cannot be split within a stage.
    """
    if run.pipeline is None or run.data is None:
        return model.interface
    layout = stage_placement(run, model).layout
    parts = layout.row_parts
    if run.data.batch_tokens is not None:
        # The numbers of rows differ among batches: each is padded to be divisible.
        parts *= run.pipeline.count(run.accumulate) // run.accumulate
    rows = RowDivision(parts, tuple(layout.row_axes))
    return dataclasses.replace(model.interface, rows=rows)


def microbatch_shape(
    run: Run, model: PromptedModel, batch_plan: BatchPlan
) -> MicroBatchShape:
    """Returns the per-device sizes of a micro-batch of the largest batch.

    Raises:
      InputError: if the rows cannot be split into the micro-batches.
    """
    _, planned = largest_batch(batch_plan)
    pipeline = run.pipeline
    count = run.accumulate if pipeline is None else pipeline.count(run.accumulate)
    _check_rows(planned, count)
    parts = stage_placement(run, model).layout.row_parts
    rows = len(planned.rows) // count
    if rows % parts:
        raise InputError(
            f"a micro-batch has {rows} rows, which cannot be divided among the {parts} "
            "devices of a stage along data and fsdp: set Pipeline.microbatches or "
            "DataSource.batch_size to another number"
        )
    decoder_prompt = model.prompts.decoder_prompt
    return MicroBatchShape(
        rows=rows // parts,
        inputs=planned.input_length,
        targets=planned.target_length,
        positions=planned.positions,
        prompt=model.prompts.length,
        decoder_prompt=0 if decoder_prompt is None else decoder_prompt.length,
    )


def _check_rows(planned: PlannedBatch, count: int) -> None:
    rows = len(planned.rows)
    if rows % count:
        raise InputError(
            f"a step has {rows} rows, which cannot be divided among "
            f"{count} micro-batches: set Pipeline.microbatches or "
            "DataSource.batch_size to another number"
        )


def plan_stages(
    run: Run, model: PromptedModel, labels: Collection[str], shape: MicroBatchShape
) -> PipelinePlan:
    """Plans the pipeline of a run for the sizes of a micro-batch.

    Raises:
      InputError: if the blocks cannot be split as configured.
    """
    if run.pipeline is None:
        raise InputError("Run.pipeline is None: set it to @Pipeline()")
    if model.weight_storage.pinned:
        raise InputError(
            "Pretrained.weights is 'pinned_host', but the devices of a pipeline keep "
            f"their blocks: give {how_to_set('Pretrained.weights', 'device')}"
        )
    shapes: Mapping[str, Any] = model.plan.abstract
    axes = logical_axes(merge(model.graph, shapes))
    work = count_work(model.config, axes, shapes, labels, shape)
    return plan_pipeline(run.pipeline, run.stages, run.accumulate, work)


def largest_batch(plan: BatchPlan) -> tuple[int, PlannedBatch]:
    """Returns index and plan of the batch with the most tokens, including padding."""

    def tokens(planned: PlannedBatch) -> tuple[int, int]:
        length = planned.input_length
        if not planned.same_tokens:
            length += planned.target_length
        rows = len(planned.rows)
        return rows * length, rows * planned.positions

    return max(enumerate(plan.one_pass()), key=lambda indexed: tokens(indexed[1]))
