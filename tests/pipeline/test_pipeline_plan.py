"""Plans of pipelines: balanced stages, bubbles, and pictures of the timeline."""

import itertools
from xml.etree import ElementTree

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.pipeline.operation_counts import ModelWork
from prompt_tuning.pipeline.pipeline_plan import balanced_layers, plan_pipeline
from prompt_tuning.pipeline.schedules import stage_orders
from prompt_tuning.pipeline.simulation import OperationCosts, simulate
from prompt_tuning.pipeline.timeline_pictures import timeline_svg, timeline_text
from prompt_tuning.settings.pipeline import Pipeline

PROMPT = OperationCosts(1.0, 1.0, 0.0, 0.1, 0.1)
FULL = OperationCosts(1.0, 1.0, 1.0)


def model(block, blocks=4, head=0.0):
    """Returns the work of a decoder-only model."""
    return ModelWork((), (block,) * blocks, OperationCosts(head))


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
def test_balanced_stages_are_the_best_of_all_divisions(stages):
    costs = [1.0, 1.0, 2.0, 1.5, 1.0, 3.0, 0.5]

    def largest(layers):
        ends = [0, *itertools.accumulate(layers)]
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(ends))

    every = [
        layers
        for layers in itertools.product(range(1, 8), repeat=stages)
        if sum(layers) == len(costs)
    ]
    layers = balanced_layers(costs, stages)
    assert layers in every
    assert largest(layers) == min(map(largest, every))


def test_equal_blocks_are_divided_evenly_and_a_head_takes_a_block_away():
    assert balanced_layers([1.0] * 8, 4) == (2, 2, 2, 2)
    plan = plan_pipeline(Pipeline(), 4, 8, model(FULL, 8, head=6.0))
    assert plan.layers[-1] == 1
    assert sum(plan.layers) == 8


def test_prompts_get_one_part_and_weights_two():
    prompt = plan_pipeline(Pipeline(), 4, 8, model(PROMPT))
    assert (prompt.schedule, prompt.two_stage) == ("1f1b", False)
    assert prompt.in_flight() == (4, 3, 2, 1)
    assert prompt.prefix
    full = plan_pipeline(Pipeline(), 4, 8, model(FULL))
    assert (full.schedule, full.two_stage) == ("zb-h1", True)
    # Nothing is trained before the first stage, so it has no p1.
    assert [cost.input_gradient for cost in full.costs] == pytest.approx(
        [0, 1 / 3, 1 / 3, 1 / 3]
    )
    # Stage s postpones s micro-batches, and holds one more while p2 runs.
    assert full.in_flight() == (4, 3, 2, 1)
    assert full.postponed() == (1, 2, 3, 4)


def test_reports_tell_the_bubble_and_how_to_make_it_small():
    work = model(OperationCosts(1.0, 1.0, 0.0))
    plan = plan_pipeline(Pipeline(), 4, 9, work)
    # (N - 1) / (M + N - 1) is 3/12, and below a tenth from M = 28.
    assert plan.report() == (
        "pipeline: 4 stages of 1, 1, 1, 1 blocks, 1f1b, backward pass in one part, 9 "
        "micro-batches; bubble 25%, below 10% from 28 micro-batches (Run.accumulate)"
    )
    many = plan_pipeline(Pipeline(microbatches=36), 4, 9, work)
    assert many.report().endswith("36 micro-batches; bubble 8%")
    never = plan_pipeline(Pipeline(schedule="none"), 4, 9, work)
    assert "bubble 75%, which no number of micro-batches brings below" in never.report()


def test_held_bytes_follow_the_order_of_each_stage():
    plan = plan_pipeline(Pipeline(schedule="zb-h1"), 4, 8, model(FULL))
    # N - s micro-batches wait for p1 and s for p2.
    assert plan.peak_bytes([100] * 4, [10] * 4) == (400, 310, 220, 130)


def test_a_plan_of_interleaved_chunks():
    plan = plan_pipeline(
        Pipeline(virtual=2), 2, 2, model(OperationCosts(1.0, 1.0, 0.0))
    )
    # 1 / (v M) of the work is a bubble of 1/5; 1 / (v M) < 1/9 from M = 6.
    assert plan.report() == (
        "pipeline: 2 stages of 1 + 1, 1 + 1 blocks, 1f1b with 2 interleaved chunks of "
        "each stage, backward pass in one part, 2 micro-batches; bubble 20%, below 10% "
        "from 6 micro-batches (Run.accumulate)"
    )
    # Stage 0 computes all forward passes first, stage 1 one of its second chunk.
    assert plan.in_flight() == (2, 2, 2, 1)
    assert plan.peak_bytes([100, 200, 10, 20], [0] * 4) == (220, 420)


def test_given_layers_have_to_be_the_models():
    with pytest.raises(InputError, match="together 5 blocks, but the model has 4"):
        plan_pipeline(Pipeline(layers=[2, 3]), 2, 8, model(FULL))
    assert plan_pipeline(Pipeline(layers=[1, 3]), 2, 8, model(FULL)).layers == (1, 3)


def timeline(two_stage):
    orders = stage_orders("1f1b", 2, 2, two_stage)
    return simulate(orders, [OperationCosts(1, 1, 1)] * 2)


def test_text_has_a_letter_for_each_unit_of_time():
    # Drawn by hand: 9 units in one part, 7 in two.
    assert timeline_text(timeline(False), width=9).splitlines() == [
        "stage 0  FF..B0.B1",
        "stage 1  .FB0FB1..",
        "F forward; B backward; . waiting",
    ]
    text = timeline_text(timeline(True), width=14)
    assert text.splitlines()[:2] == [
        "stage 0  F0F1..p0w0p1w1",
        "stage 1  ..F0p0F1p1w0w1",
    ]


def test_text_of_interleaved_chunks():
    # Drawn by hand: 12 units of work, and a bubble of 3, one chunk's F and B.
    orders = stage_orders("1f1b", 2, 2, False, virtual=2)
    drawn = simulate(orders, [OperationCosts(1, 1, 1)] * 4)
    assert timeline_text(drawn, width=45).splitlines() == [
        "stage 0  F0aF1aF0bF1b......B0b---...B1b---B0a---B1a---",
        "stage 1  ...F0aF1aF0bB0b---F1bB1b---B0a---B1a---......",
        "F forward; B backward; a to b chunk of the stage; . waiting",
    ]


def test_svg_has_a_bar_for_each_operation():
    drawn = timeline(True)
    root = ElementTree.fromstring(timeline_svg(drawn, "a <title>"))
    bars = [bar for bar in root.iter() if bar.tag.endswith("rect")]
    # The background, a row for each stage, and the legend.
    assert len(bars) == len(drawn.spans) + 1 + 2 + 4
    texts = [text.text for text in root.iter() if text.tag.endswith("text")]
    assert texts.count("0") == texts.count("1") == 6
