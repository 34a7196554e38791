"""Print and draw how the stages of a pipeline share a step."""

import itertools
from pathlib import Path

from rich.console import Console

from prompt_tuning.cli.byte_sizes import format_size
from prompt_tuning.cli.console import print_lines
from prompt_tuning.config.run import Run
from prompt_tuning.core.atomic_files import write_file
from prompt_tuning.pipeline.timeline_pictures import (
    chunk_letter,
    timeline_svg,
    timeline_text,
)
from prompt_tuning.training.pipeline_preview import PipelinePreview

COLUMNS = ("forward", "p1", "p2", "weights", "hold for p1", "hold for p2", "held")
WIDTHS = (8, 8, 8, 10, 15, 15, 10)
EXPLANATION = (
    "forward, p1 (gradient of the input), p2 (gradient of the weights): products of a",
    "micro-batch, 100% for an average stage; hold: most micro-batches at a time, times",
    "the bytes of each on a device, from the forward pass to p1 and from p1 to p2;",
    "held: the most bytes of all of them at a time",
)
CHUNKS = (
    "a, b, ...: chunks of a stage; weights and held are those of the whole stage",
)
CONSOLE_WIDTH = 120
"""Number of columns for a timeline."""


def print_pipeline(run: Run, picture: Path | None) -> None:
    """Prints the stages of a run, their timeline and its bubble.

    Raises:
      InputError: if the run cannot be used, or has only one stage.
    """
    estimate = PipelinePreview.open(run)
    timeline, report = estimate.plan.timeline, estimate.plan.report()
    console = Console(width=CONSOLE_WIDTH)
    print_lines(console, *_stage_table(estimate), "")
    print_lines(console, *timeline_text(timeline).splitlines(), "", report)
    if picture is not None:
        write_file(picture, timeline_svg(timeline, report).encode(), force=True)
        print_lines(console, f"picture: {picture}")


def _stage_table(estimate: PipelinePreview) -> list[str]:
    """Describes the micro-batch and each stage, line by line."""
    shape, plan = estimate.shape, estimate.plan
    lines = [
        f"micro-batch: {shape.rows} rows of {shape.inputs} tokens on each device",
        _row("stage", *COLUMNS).replace("│", "┃"),
    ]
    kept, postponed = estimate.microbatch_bytes()
    for_p1 = plan.of_stages([*map(_times, plan.in_flight(), kept)])
    for_p2 = plan.of_stages([*map(_times, plan.postponed(), postponed)])
    layers, costs = plan.of_stages(plan.layers), plan.of_stages(plan.costs)
    weights, held = estimate.weight_bytes(), plan.peak_bytes(kept, postponed)
    for stage, chunk in itertools.product(range(plan.stages), range(plan.virtual)):
        blocks, cost = layers[stage][chunk], costs[stage][chunk]
        shares = (cost.forward, cost.input_gradient, cost.weight_gradient)
        cells = [
            *(f"{share:.1%}" for share in shares),
            "" if chunk else format_size(weights[stage]),
            for_p1[stage][chunk],
            for_p2[stage][chunk],
            "" if chunk else format_size(held[stage]),
        ]
        name = f"{stage}{chunk_letter(chunk) if plan.virtual > 1 else ''}"
        lines.append(_row(f"{name}: {blocks} block{'s' * (blocks > 1)}", *cells))
    return [*lines, *EXPLANATION, *CHUNKS[: plan.virtual > 1]]


def _times(count: int, size: int) -> str:
    return f"{count} x {format_size(size)}" if count else "0"


def _row(name: str, *cells: str) -> str:
    widths = zip(cells, WIDTHS, strict=True)
    return " │ ".join([f"│ {name:<14}", *(f"{x:>{n}}" for x, n in widths)]) + " │"
