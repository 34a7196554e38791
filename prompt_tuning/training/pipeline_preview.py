"""Plan a run's pipeline before its weights are read."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from prompt_tuning.config.run import Run
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError
from prompt_tuning.data.batching.batches import stream_batches
from prompt_tuning.data.examples.example_groups import ExampleGroups
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.pipeline.operation_counts import MicroBatchShape
from prompt_tuning.pipeline.pipeline_plan import PipelinePlan
from prompt_tuning.sharding.array_placement import Placement
from prompt_tuning.training import pipeline_setup
from prompt_tuning.training.pipelined_step import pipelined_gradients
from prompt_tuning.training.run_plan import RunPlan, plan_run

FIRST_STAGE = ("token_embedder/", "position_embedder/")
"""Parameters before the first block; all others outside the blocks come last."""


@dataclasses.dataclass(frozen=True)
class PipelinePreview:
    """A run in stages, without its weights."""

    run_plan: RunPlan
    plan: PipelinePlan
    shape: MicroBatchShape
    examples: Examples | ExampleGroups
    batch: Batch

    @classmethod
    def open(cls, run: Run) -> "PipelinePreview":
        """Opens a run and plans its pipeline."""
        if run.stages == 1:
            raise InputError(
                "the run has one stage: give --gin.MeshShape.stage=N, with N the "
                "number of stages"
            )
        run_plan = plan_run(run)
        examples = run_plan.examples()
        batch_plan = run_plan.batch_plan(examples)
        shape = pipeline_setup.microbatch_shape(run, run_plan.model, batch_plan)
        plan = pipeline_setup.plan_stages(run, run_plan.model, run_plan.labels, shape)
        index, _ = pipeline_setup.largest_batch(batch_plan)
        pad_id = run_plan.model.config.pad_id
        (batch,) = stream_batches(
            examples, batch_plan, index, index + 1, pad_id=pad_id, prefetch=0
        )
        return cls(run_plan, plan, shape, examples, batch)

    def microbatch_bytes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the bytes of a micro-batch on a device of each stage or chunk.

        Returns:
          the bytes held from the forward pass to p1, and from p1 to p2; the latter
          include what p1 recomputed under a rematerialization policy.
        """
        model, placement = self.run_plan.model, self.run_plan.model.placement
        assert placement is not None
        trained = {
            path: jax.ShapeDtypeStruct(placement.padded_shape(path), jnp.float32)
            for path in self.run_plan.labels
        }
        objective = self.run_plan.objective(self.examples)
        stages = pipelined_gradients(self.run_plan, objective, self.plan).traced(
            trained,
            {},
            self.batch,
            jax.random.key(0) if model.drops else None,
        )
        kept = tuple(programs.kept_bytes for programs in stages.programs)
        return kept, tuple(programs.postponed_bytes for programs in stages.programs)

    def weight_bytes(self) -> tuple[int, ...]:
        """Returns the bytes of frozen and trained parameters per device of each stage.

        A tied embedding table is in both the first and the last stage.
        """
        model = self.run_plan.model
        placement = pipeline_setup.stage_placement(self.run_plan.run, model)
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
        return tuple(map(sum, self.plan.of_stages(totals)))

    @property
    def _tied(self) -> bool:
        config = self.run_plan.model.config
        return config.tied_head and not config.separate_tables


def _device_bytes(path: str, leaf: Any, placement: Placement) -> int:
    """Returns the bytes of one device's shard of a parameter within its stage."""
    shape = placement.shardings[path].shard_shape(placement.padded_shape(path))
    size = jnp.dtype(leaf.dtype).itemsize
    for length in shape:
        size *= length
    return size
