"""Checks of a pipeline's settings, before a model is read."""

from collections.abc import Sequence

from prompt_tuning.core.errors import InputError
from prompt_tuning.pipeline.schedules import check_schedule
from prompt_tuning.settings.pipeline import AUTO, Pipeline


def check_pipeline(pipeline: Pipeline, stages: int, accumulate: int) -> None:
    """Checks settings against the numbers of stages and micro-batches.

    Raises:
      InputError: gives the numbers.
    """
    count = pipeline.count(accumulate)
    if count % accumulate:
        raise InputError(
            f"Pipeline.microbatches is {count}, which is not a multiple of "
            f"Run.accumulate, {accumulate}: each of its batches is divided further"
        )
    two_stage = pipeline.two_stage is not False
    if pipeline.schedule != AUTO or pipeline.virtual > 1:
        schedule = pipeline.schedule_for(two_stage)
        check_schedule(schedule, stages, count, two_stage, pipeline.virtual)
    if pipeline.layers is None or len(pipeline.layers) == stages * pipeline.virtual:
        return
    expected = f"the mesh has {stages}"
    if pipeline.virtual > 1:
        expected += (
            f" with {pipeline.virtual} chunks each (Pipeline.virtual): expected "
            f"{stages * pipeline.virtual} numbers"
        )
    raise InputError(
        f"Pipeline.layers is {list(pipeline.layers)}, blocks of {len(pipeline.layers)} "
        f"stages, but {expected}"
    )


def check_blocks(
    layers: Sequence[int] | None, stages: int, blocks: int, virtual: int = 1
) -> None:
    """Checks that each stage gets a block, and that the stages have all blocks.

    Args:
      layers: number of blocks of each stage, or chunk, if set.
      stages: number of stages.
      blocks: number of blocks of the model, including an encoder's.
      virtual: number of chunks per stage.

    Raises:
      InputError: gives the numbers.
    """
    if virtual > 1 and stages * virtual > blocks:
        raise InputError(
            f"MeshShape.stage is {stages} and Pipeline.virtual is {virtual}, together "
            f"{stages * virtual} chunks, but the model has {blocks} blocks and each "
            f"chunk needs one: set virtual to {max(1, blocks // stages)} or less"
        )
    if stages > blocks:
        raise InputError(
            f"MeshShape.stage is {stages}, but the model has {blocks} blocks and each "
            f"stage needs one: set it to {blocks} or less"
        )
    if layers is not None and sum(layers) != blocks:
        raise InputError(
            f"Pipeline.layers is {list(layers)}, together {sum(layers)} blocks, but "
            f"the model has {blocks}"
        )
