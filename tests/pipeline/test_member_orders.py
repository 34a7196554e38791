"""The order in which members of a sweep share a pipeline."""

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.pipeline.member_orders import (
    MemberOrder,
    MemberOrders,
    check_member_schedule,
)
from prompt_tuning.pipeline.schedules import Kind

TIMES = {
    Kind.FORWARD: 1,
    Kind.BACKWARD: 2,
    Kind.INPUT_GRADIENT: 1,
    Kind.WEIGHT_GRADIENT: 1,
}


def seconds(members, microbatches, stages, steps, *, two_stage=False, prefix=False):
    """Simulates steps of members; a step waits for all of the member's last one.

    Fails if the stages wait for each other forever.
    """
    orders = MemberOrders(stages, members, microbatches, two_stage)
    sequences = []
    for stage in range(stages):
        order = MemberOrder(orders, stage, prefix)
        added = [list(order.add_step()) for _ in range(members * steps)]
        sequences.append([op for ops in [*added, list(order.finish())] for op in ops])
    backward = Kind.INPUT_GRADIENT if two_stage else Kind.BACKWARD
    ends, free, position = {}, [0] * stages, [0] * stages

    def needed(stage, step, kind, index):
        if kind == Kind.FORWARD and stage:
            yield stage - 1, step, kind, index
        if kind == Kind.FORWARD and not stage and step >= members:
            every = [(step - members, backward, microbatches - 1)]
            if two_stage:
                every.append((step - members, Kind.WEIGHT_GRADIENT, microbatches - 1))
            yield from ((s, *result) for s in range(stages) for result in every)
        if kind == backward:
            yield stage, step, Kind.FORWARD, index
            if stage < stages - 1:
                yield stage + 1, step, kind, index

    while any(at < len(s) for at, s in zip(position, sequences, strict=True)):
        before = list(position)
        for stage, sequence in enumerate(sequences):
            while position[stage] < len(sequence):
                step, (kind, index, _) = sequence[position[stage]]
                results = list(needed(stage, step, kind, index))
                if not all(result in ends for result in results):
                    break
                start = max([free[stage], *(ends[result] for result in results)])
                free[stage] = start + TIMES.get(kind, 0)
                ends[stage, step, kind, index] = free[stage]
                position[stage] += 1
        assert position != before, "the stages wait for each other"
    parts = 3 if two_stage else 2
    operations = members * steps * (microbatches * parts + 2 * prefix)
    assert len(ends) == stages * operations
    return max(free)


@pytest.mark.parametrize("two_stage", [False, True])
@pytest.mark.parametrize(
    ("members", "microbatches", "stages"),
    [(4, 1, 4), (4, 2, 4), (5, 3, 4), (8, 1, 4), (3, 1, 2)],
)
def test_enough_members_leave_no_bubble(members, microbatches, stages, two_stage):
    few, many = (
        seconds(members, microbatches, stages, steps, two_stage=two_stage)
        for steps in (4, 24)
    )
    without_bubbles = 20 * members * microbatches * 3
    assert many - few <= 1.02 * without_bubbles


@pytest.mark.parametrize("members", [1, 2, 3])
@pytest.mark.parametrize("two_stage", [False, True])
def test_few_members_wait_for_their_updates_and_never_forever(members, two_stage):
    assert seconds(members, 1, 4, 3, two_stage=two_stage) >= 3 * members * 3


def test_a_prompt_crosses_the_stages_once_for_each_step():
    order = MemberOrder(MemberOrders(2, 2, 2), 1, prefix=True)
    operations = [*order.add_step(), *order.add_step(), *order.finish()]
    for step in (0, 1):
        own = [kind for at, (kind, *_) in operations if at == step]
        assert own[0] == Kind.PREFIX_FORWARD
        assert own[-1] == Kind.PREFIX_BACKWARD
        assert own.count(Kind.PREFIX_FORWARD) == own.count(Kind.PREFIX_BACKWARD) == 1


def test_a_schedule_that_ends_with_each_step_is_refused():
    with pytest.raises(InputError, match=r"'gpipe', but the members"):
        check_member_schedule("gpipe")
