"""Orders of operations: each once, in a possible order, and never a deadlock."""

import itertools
import subprocess
import sys
from collections import Counter

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.pipeline.schedules import (
    DeadlockError,
    Kind,
    Operation,
    runnable_sequence,
    stage_orders,
)
from prompt_tuning.settings.pipeline import SCHEDULES

SIZES = list(itertools.product((1, 2, 3, 4, 5, 8), (1, 2, 3, 4, 7, 8, 16, 17)))


def possible_schedules():
    """Yields every schedule that is defined for a size, in one part and in two."""
    for schedule, two_stage, (stages, count) in itertools.product(
        SCHEDULES, (False, True), SIZES
    ):
        if schedule == "zb-h1" and not two_stage:
            continue
        if schedule == "1f1b-2" and count < 2 * stages:
            continue
        yield schedule, stages, count, two_stage


def letters(order, *, chunks=False):
    """Returns an order as text: F and B, or F, p and w, and PF and PB.

    Letters after the micro-batch are the stage's chunks.
    """
    names = {"forward": "F", "backward": "B"}
    names |= {"input_gradient": "p", "weight_gradient": "w"}
    names |= {"prefix_forward": "PF", "prefix_backward": "PB"}
    return " ".join(
        f"{names[kind]}{index}{'abcd'[chunk] if chunks else ''}"
        for kind, index, chunk in order
    )


def check_orders(orders, count, two_stage, virtual=1):
    """Checks that each chunk computes each micro-batch once, in a possible order."""
    parts = ["input_gradient", "weight_gradient"] if two_stage else ["backward"]
    kinds = ["forward", *parts]
    expected = list(itertools.product(kinds, range(count), range(virtual)))
    for order in orders:
        rows = [operation for operation in order if "prefix" not in operation.kind]
        assert Counter(rows) == Counter(expected)
    list(runnable_sequence(orders))


@pytest.mark.parametrize("prefix", [False, True])
def test_every_order_is_complete_and_possible(prefix):
    for schedule, stages, count, two_stage in possible_schedules():
        orders = stage_orders(schedule, stages, count, two_stage, prefix=prefix)
        check_orders(orders, count, two_stage)
        assert len(orders) == stages
        operations = count * (3 if two_stage else 2) + 2 * prefix
        assert [len(order) for order in orders] == [operations] * stages


def test_published_orders_of_the_first_stage():
    # PipeDream's figure 4 (arXiv 1806.03377), and figure 3 of arXiv 2401.10241.
    first = stage_orders("1f1b", 4, 6, False)[0]
    assert letters(first) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5"
    last = stage_orders("1f1b", 4, 3, False)[3]
    assert letters(last) == "F0 B0 F1 B1 F2 B2"
    first, *_, last = stage_orders("zb-h1", 4, 5, True)
    assert letters(first) == "F0 F1 F2 F3 p0 w0 F4 p1 w1 p2 w2 p3 w3 p4 w4"
    assert letters(last) == "F0 p0 F1 p1 F2 p2 F3 p3 w0 F4 p4 w1 w2 w3 w4"


def test_published_order_of_interleaved_chunks():
    # Megatron-LM's forward_backward_pipelining_with_interleaving: of 2 stages with 2
    # chunks, stage 0 computes (2 - 0 - 1) * 2 + (2 - 1) * 2 = 4 forward passes before
    # the first backward pass, and stage 1 computes 2. The chunks take turns with 2
    # micro-batches, the backward passes in reverse; each starts with a forward pass.
    first, last = stage_orders("1f1b", 2, 4, False, virtual=2)
    assert letters(first, chunks=True) == (
        "F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a B2b B3b B2a B3a"
    )
    assert letters(last, chunks=True) == (
        "F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a"
    )


def test_every_interleaved_order_is_complete_and_possible():
    sizes = itertools.product((1, 2, 3, 4), (2, 3, 4), (1, 2, 5), (False, True))
    for (stages, virtual, groups, two_stage), prefix in itertools.product(
        sizes, (False, True)
    ):
        orders = stage_orders(
            *("1f1b", stages, stages * groups, two_stage),
            prefix=prefix,
            virtual=virtual,
        )
        check_orders(orders, stages * groups, two_stage, virtual)
        parts = stages * groups * (3 if two_stage else 2) + 2 * prefix
        assert {len(order) for order in orders} == {virtual * parts}


def test_prefix_goes_first_and_after_the_last_gradient_of_a_row():
    orders = stage_orders("gpipe", 2, 2, True, prefix=True)
    assert letters(orders[0]) == "PF0 F0 F1 p0 p1 PB0 w0 w1"
    late = tuple(sorted(orders[0], key=lambda each: each.kind == "input_gradient"))
    with pytest.raises(DeadlockError):
        list(runnable_sequence((late, orders[1])))


def swapped(order, first, second):
    order = list(order)
    a, b = order.index(Operation(*first)), order.index(Operation(*second))
    order[a], order[b] = order[b], order[a]
    return tuple(order)


def test_operations_before_what_they_need_are_refused():
    orders = stage_orders("gpipe", 2, 2, True)
    for first, second in (
        (("forward", 0), ("input_gradient", 0)),
        (("input_gradient", 1), ("weight_gradient", 1)),
    ):
        for stage in (0, 1):
            wrong = list(orders)
            wrong[stage] = swapped(orders[stage], first, second)
            with pytest.raises(DeadlockError, match=f"stage {stage} waits with"):
                list(runnable_sequence(wrong))


def test_stages_that_wait_for_each_other_are_an_error_not_a_hang():
    # Stage 0 wants the gradient of 0 before it sends 1; stage 1 computes 1 first.
    ahead = tuple(
        Operation(k, i) for i in (0, 1) for k in (Kind.FORWARD, Kind.BACKWARD)
    )
    late = tuple(Operation(k, i) for i in (1, 0) for k in (Kind.FORWARD, Kind.BACKWARD))
    list(runnable_sequence((ahead, ahead)))
    with pytest.raises(DeadlockError) as problem:
        list(runnable_sequence((ahead, late)))
    assert str(problem.value) == (
        "the schedule cannot continue: stage 0 waits with backward 0 for "
        "input_gradient 0 of stage 1; stage 1 waits with forward 1 for forward 1 of "
        "stage 0"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1b-2", 4, 7, True), "4 stages needs at least 8 micro-batches, but there "),
        (("zb-h1", 4, 8, False), "two_stage is False: set it to None or True"),
        (("zb-h2", 4, 8, True), "no schedule 'zb-h2'.*zb-h1"),
        (("gpipe", 4, 0, True), "4 stages and 0 micro-batches"),
        (("zb-h1", 4, 8, True, 2), "virtual is 2 with schedule 'zb-h1', but only '1f1"),
        (("1f1b", 4, 6, True, 2), "a multiple of the 4 stages, but it is 6: set .* 8,"),
    ],
)
def test_impossible_settings_are_refused_with_the_numbers(arguments, message):
    *numbers, virtual = [*arguments, 1][:5]
    with pytest.raises(InputError, match=message):
        stage_orders(*numbers, virtual=virtual)


def test_schedules_and_simulation_do_not_import_jax():
    code = (
        "import sys, prompt_tuning.pipeline.simulation\n"
        "sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
