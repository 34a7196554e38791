"""Times of schedules against numbers derived by hand and published formulas."""

import itertools
import math

import pytest

from prompt_tuning.pipeline.schedules import Kind, Operation, stage_orders
from prompt_tuning.pipeline.simulation import (
    OperationCosts,
    bubble_limit,
    microbatches_below,
    peak_held,
    simulate,
)

SIZES = [(1, 1), (2, 2), (2, 5), (3, 4), (4, 4), (4, 9), (5, 16), (8, 8)]
COSTS = [(1, 1, 1), (1, 1, 0), (1, 1, 0.05), (1.5, 2, 1), (1, 3, 2)]

UNIT = OperationCosts(1, 1, 1)


def makespan(schedule, stages, count, two_stage, cost=UNIT, **options):
    """Returns the makespan of equal stages."""
    orders = stage_orders(schedule, stages, count, two_stage)
    return simulate(orders, [cost] * stages, **options).makespan


@pytest.mark.parametrize(
    ("schedule", "count", "one_part", "two_parts"),
    [
        ("none", 1, 12, 9),
        ("gpipe", 4, 21, 18),
        ("1f1b", 4, 21, 15),
        ("1f1b-2", 8, 33, 27),
        ("zb-h1", 4, None, 15),
        ("zb-h1", 8, None, 27),
    ],
)
def test_four_stages_of_unit_costs(schedule, count, one_part, two_parts):
    # Drawn by hand on squared paper.
    if one_part is not None:
        assert makespan(schedule, 4, count, False) == one_part
    assert makespan(schedule, 4, count, True) == two_parts


def sizes_and_costs():
    """Yields stages, micro-batches and costs of equal stages, with M >= N."""
    for (stages, count), (f, p, w) in itertools.product(SIZES, COSTS):
        yield stages, count, f, p, w, OperationCosts(f, p, w)


def test_one_part_takes_what_the_papers_derive():
    # GPipe and 1F1B: N - 1 times all three costs in which a stage waits (Narayanan et
    # al. 2021, arXiv 2104.04473, section 2.2).
    for stages, count, f, p, w, cost in sizes_and_costs():
        expected = pytest.approx((count + stages - 1) * (f + p + w))
        assert makespan("gpipe", stages, count, False, cost) == expected
        assert makespan("1f1b", stages, count, False, cost) == expected
        assert makespan("none", stages, count, False, cost) == pytest.approx(
            count * stages * (f + p + w)
        )


def test_two_parts_take_what_the_papers_derive():
    # p2 crosses no stages, so each schedule waits for F and p1 only. ZB-H1:
    # (N - 1) (F + p1 - p2), table 2 of arXiv 2401.10241.
    for stages, count, f, p, w, cost in sizes_and_costs():
        steps = count + stages - 1
        assert makespan("none", stages, count, True, cost) == pytest.approx(
            count * (stages * (f + p) + w)
        )
        assert makespan("gpipe", stages, count, True, cost) == pytest.approx(
            steps * (f + p) + count * w
        )
        if f >= w and p >= w:
            assert makespan("zb-h1", stages, count, True, cost) == pytest.approx(
                count * (f + p + w) + (stages - 1) * (f + p - w)
            )


def test_interleaved_chunks_wait_as_published():
    # The bubble is (p - 1) / (v m) of the work (Narayanan et al. 2021, arXiv
    # 2104.04473, section 2.2).
    for stages, virtual, groups in itertools.product((2, 3, 4), (2, 3, 4), (1, 2, 4)):
        count = groups * stages

        def bubble(costs, *, two_stage, sizes=(stages, virtual, count)):
            stages, virtual, count = sizes
            orders = stage_orders("1f1b", stages, count, two_stage, virtual=virtual)
            chunk = OperationCosts(*(cost / virtual for cost in costs))
            timeline = simulate(orders, [chunk] * stages * virtual)
            assert timeline.busy == pytest.approx([count * sum(costs)] * stages)
            return timeline.makespan / (count * sum(costs)) - 1

        for costs in COSTS:
            published = pytest.approx((stages - 1) / (virtual * count))
            assert bubble(costs, two_stage=False) == published
        # In two parts a stage waits for F + p1 - p2 of a chunk, a third as long here.
        third = pytest.approx((stages - 1) / (3 * virtual * count))
        assert bubble((1, 1, 1), two_stage=True) == third


def test_two_parts_without_weight_gradients_gain_nothing():
    cost = OperationCosts(1, 1, 0)
    for stages, count in SIZES:
        one_part = makespan("1f1b", stages, count, False, cost)
        for schedule in ("1f1b", "zb-h1"):
            assert makespan(schedule, stages, count, True, cost) == one_part


def test_no_schedule_beats_the_work_or_the_path_of_a_microbatch():
    for schedule, two_stage in itertools.product(
        ("none", "gpipe", "1f1b"), (False, True)
    ):
        for stages, count in ((3, 7), (4, 2), (5, 1)):
            costs = [OperationCosts(1 + s, 2 + s % 2, 1.5) for s in range(stages)]
            timeline = simulate(stage_orders(schedule, stages, count, two_stage), costs)
            work = [count * cost.total for cost in costs]
            path = sum(cost.forward + cost.input_gradient for cost in costs)
            assert timeline.makespan >= max(*work, path)
            assert timeline.busy == pytest.approx(work)
            expected = 1 - sum(work) / (stages * timeline.makespan)
            assert timeline.bubble_share == pytest.approx(expected)


def test_operations_of_a_stage_never_overlap_and_wait_for_their_inputs():
    costs = [OperationCosts(1, 2, 1), OperationCosts(3, 1, 2), OperationCosts(1, 1, 4)]
    orders = stage_orders("zb-h1", 3, 5, True)
    timeline = simulate(orders, costs, transfer=0.25)
    ends = {(span.stage, span.operation): span.end for span in timeline.spans}
    for stage, order in enumerate(orders):
        spans = [span for span in timeline.spans if span.stage == stage]
        assert [span.operation for span in spans] == list(order)
        for before, after in itertools.pairwise(spans):
            assert before.end <= after.start
        for span in spans:
            neighbor = {"forward": stage - 1, "input_gradient": stage + 1}
            if 0 <= (other := neighbor.get(span.operation.kind, -1)) < 3:
                assert span.start >= ends[other, span.operation] + 0.25


def test_messages_delay_the_path_of_a_single_microbatch():
    # Three messages forward and three back.
    assert makespan("none", 4, 1, False, transfer=0.5) == 12 + 6 * 0.5


def test_prefix_crosses_the_stages_once_before_and_once_after_the_rows():
    cost = OperationCosts(1, 1, 0, prefix_forward=2, prefix_backward=3)
    orders = stage_orders("1f1b", 2, 4, False, prefix=True)
    timeline = simulate(orders, [cost] * 2)
    ends = {(span.stage, span.operation): span for span in timeline.spans}
    # Stage 0 and 1 compute 2 each; the rows take (M + N - 1) * 2 after stage 0's; then
    # stage 0's prefix waits for that of stage 1, which ends 3 after its last row.
    assert ends[1, Operation(Kind.FORWARD, 0)].start == 4
    last = ends[1, Operation(Kind.BACKWARD, 3)].end
    assert ends[1, Operation(Kind.PREFIX_BACKWARD, 0)].start == last
    assert ends[0, Operation(Kind.PREFIX_BACKWARD, 0)].start == last + 3
    assert timeline.makespan == last + 6


def test_held_microbatches_of_each_stage():
    def held(schedule, count, two_stage, **sizes):
        orders = stage_orders(schedule, 4, count, two_stage)
        return [peak_held(order, **sizes) for order in orders]

    assert held("1f1b", 8, False) == [4, 3, 2, 1]
    assert held("gpipe", 8, False) == [8, 8, 8, 8]
    assert held("none", 8, True) == [1, 1, 1, 1]
    assert held("zb-h1", 8, True) == [4, 4, 4, 4]
    assert held("1f1b-2", 8, True) == [8, 8, 8, 8]
    # Prompts: nothing waits for p2, so two parts hold as little as one.
    assert held("1f1b", 8, True, kept=2, postponed=0) == [8, 6, 4, 2]
    # Stage s of zb-h1 holds 4 - s for p1 and s for p2.
    expected = [4 * 3, 3 * 3 + 1, 2 * 3 + 2, 3 + 3]
    assert held("zb-h1", 8, True, kept=3, postponed=1) == expected


def test_zero_bubble_never_holds_more_than_its_stages():
    for stages, count in itertools.product(range(1, 9), range(1, 20)):
        for order in stage_orders("zb-h1", stages, count, True):
            assert peak_held(order) == min(stages, count)


def test_fewest_microbatches_for_a_bubble_below_a_tenth():
    def fewest(schedule, two_stage, *cost, stages=4):
        return microbatches_below(
            0.1, schedule, two_stage, [OperationCosts(*cost)] * stages
        )

    # (N - 1) / (M + N - 1) < 1/10 from M = 9 (N - 1) + 1.
    for stages in (2, 4, 6):
        assert fewest("1f1b", False, 1, 1, 1, stages=stages) == 9 * (stages - 1) + 1
    assert fewest("gpipe", False, 1, 1, 0) == 28
    # 3 / (3 M + 3) < 1/10 from M = 10.
    assert fewest("zb-h1", True, 1, 1, 1) == 10
    assert fewest("none", True, 1, 1, 1) is None
    assert fewest("none", True, 1, 1, 1, stages=1) == 1


def test_fewest_microbatches_of_interleaved_chunks_are_a_multiple_of_the_stages():
    # (N - 1) / (v M + N - 1) < 1/10 from v M = 28: M = 14, so 16 with 4 stages.
    costs = [OperationCosts(1, 1, 0)] * 8
    assert microbatches_below(0.1, "1f1b", False, costs, 2) == 16


def test_uneven_stages_leave_a_bubble_that_no_microbatch_removes():
    costs = [OperationCosts(1, 1, 1), OperationCosts(2, 2, 2)]
    assert bubble_limit(costs) == pytest.approx(0.25)
    assert microbatches_below(0.25, "1f1b", False, costs) is None
    count = microbatches_below(0.3, "1f1b", False, costs)
    assert count is not None
    shares = [
        simulate(stage_orders("1f1b", 2, each, False), costs).bubble_share
        for each in (count - 1, count)
    ]
    assert shares[1] < 0.3 <= shares[0]
    assert math.isclose(bubble_limit([OperationCosts(1, 1, 1)] * 3), 0, abs_tol=1e-12)
