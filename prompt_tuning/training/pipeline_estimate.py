"""The plan of a run's pipeline, made before its weights are read."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from prompt_tuning.config.run import Run
from prompt_tuning.core.errors import InputError
from prompt_tuning.data.batching.batch_plan import BatchPlan, PlannedBatch
from prompt_tuning.pipeline.operation_counts import MicroBatchShape, count_work
from prompt_tuning.pipeline.pipeline_plan import PipelinePlan, plan_pipeline
from prompt_tuning.sharding.array_placement import Placement
from prompt_tuning.training.memory_estimate import largest_batch
from prompt_tuning.training.run_plan import RunPlan, plan_run

FIRST_STAGE = ("token_embedder/", "position_embedder/")
"""Parameters before the first block; all others outside of the blocks come last."""


@dataclasses.dataclass(frozen=True)
class PipelineEstimate:
    """A run in stages whose weights are not read.

    Attributes:
      opened: the opened run.
      plan: the plan of its pipeline for the largest batch.
      shape: sizes of a micro-batch.
    """

    opened: RunPlan
    plan: PipelinePlan
    shape: MicroBatchShape

    @classmethod
    def open(cls, run: Run) -> "PipelineEstimate":
        """Opens a run and plans its pipeline.

        Raises:
          InputError: if the run cannot be used, or it has one stage.
        """
        if run.stages == 1:
            raise InputError(
                "the run has one stage: give --gin.MeshShape.stage=N, with N the "
                "number of stages"
            )
        opened = plan_run(run)
        batch_plan = opened.batch_plan(opened.examples())
        shape = microbatch_shape(opened, batch_plan)
        return cls(opened, plan_stages(opened, shape), shape)

    def weight_bytes(self) -> tuple[int, ...]:
        """Bytes of the frozen and trained parameters on each device of each stage.

        An embedding table that is also the head is on the first and the last stage.
        """
        model = self.opened.model
        placement = _placement(self.opened)
        blocks: dict[str, float] = {"encoder": 0.0, "decoder": 0.0}
        first = last = 0
        for path, leaf in model.plan.abstract.items():
            size = _device_bytes(path, leaf, placement)
            if placement.axes[path].names[:1] == ("layers",):
                blocks[path.partition("/")[0]] += size / leaf.shape[0]
            elif path.startswith(FIRST_STAGE):
                first += size
                last += size if path.startswith("token") and self._tied else 0
            else:
                last += size
        sizes = [blocks["encoder"]] * model.config.encoder_layers
        sizes += [blocks["decoder"]] * model.config.layers
        totals, start = [], 0
        for count in self.plan.layers:
            totals.append(round(sum(sizes[start : start + count])))
            start += count
        totals[0] += first
        totals[-1] += last
        return tuple(totals)

    @property
    def _tied(self) -> bool:
        return self.opened.model.config.tied_head


def _placement(opened: RunPlan) -> Placement:
    placement = opened.model.placement
    if placement is None:
        raise InputError("a run in stages needs a mesh: set Run.mesh to @MeshShape()")
    return placement


def _device_bytes(path: str, leaf: Any, placement: Placement) -> int:
    """Returns the bytes of one device's shard of a parameter within its stage."""
    shape = placement.shardings[path].shard_shape(placement.padded_shape(path))
    size = jnp.dtype(leaf.dtype).itemsize
    for length in shape:
        size *= length
    return size


def microbatch_shape(opened: RunPlan, batch_plan: BatchPlan) -> MicroBatchShape:
    """Returns the sizes of a micro-batch of a run's largest batch, on each device.

    Raises:
      InputError: if its rows cannot be divided among the micro-batches.
    """
    _, planned = largest_batch(batch_plan)
    run, model = opened.run, opened.model
    pipeline = run.pipeline
    count = run.accumulate if pipeline is None else pipeline.count(run.accumulate)
    _check_rows(planned, count)
    parts = _placement(opened).layout.row_parts
    decoder_prompt = model.prompts.decoder_prompt
    return MicroBatchShape(
        rows=-(-len(planned.rows) // (count * parts)),
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


def plan_stages(opened: RunPlan, shape: MicroBatchShape) -> PipelinePlan:
    """Plans the pipeline of a run for the sizes of a micro-batch.

    Raises:
      InputError: if the blocks cannot be divided as they are to be.
    """
    run, model = opened.run, opened.model
    if run.pipeline is None:
        raise InputError("Run.pipeline is None: set it to @Pipeline()")
    shapes: Mapping[str, Any] = model.plan.abstract
    axes = _placement(opened).axes
    work = count_work(model.config, axes, shapes, opened.labels, shape)
    return plan_pipeline(run.pipeline, run.stages, run.accumulate, work)
