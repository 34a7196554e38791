"""Megatron's interleaved schedule, with many chunks per stage; without JAX.

A micro-batch passes all stages once per chunk. A stage waits only for the first stage's
chunk, so the bubble of `v` chunks is `(N - 1) / (v M)` of the work instead of `(N - 1)
/ M` (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
"""

from collections import deque

from prompt_tuning.pipeline.operations import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Kind,
    Operation,
    Order,
)


def interleaved_order(
    sizes: tuple[int, int, int], stage: int, two_stage: bool
) -> Order:
    """Orders a stage's chunks like Megatron's interleaved 1f1b.

    The chunks take turns, with as many micro-batches per turn as there are stages. As
    without chunks, p2 is postponed until no forward pass is left. `sizes` are the
    numbers of stages, of chunks per stage, and of micro-batches.
    """
    stages, virtual, microbatches = sizes
    total = virtual * microbatches
    warm = min(total, 2 * (stages - stage - 1) + (virtual - 1) * stages)
    turns = []
    for i in range(total):
        group, place = divmod(i, stages * virtual)
        chunk, offset = divmod(place, stages)
        turns.append((group * stages + offset, chunk))
    backward: Kind = INPUT_GRADIENT if two_stage else BACKWARD
    forwards = [Operation(FORWARD, *turn) for turn in turns]
    backwards = [Operation(backward, i, virtual - 1 - chunk) for i, chunk in turns]
    order, postponed = forwards[:warm], deque[Operation]()
    for i, operation in enumerate(backwards):
        order += [*forwards[warm + i : warm + i + 1], operation]
        if two_stage:
            postponed.append(operation._replace(kind=WEIGHT_GRADIENT))
            if warm + i >= total:
                order.append(postponed.popleft())
    return (*order, *postponed)
