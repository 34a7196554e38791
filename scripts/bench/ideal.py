"""The time that a step's matrix products take when nothing is between them.

Each distinct product of the compiled step is timed alone, in the layout and with the
kernel that the step has it in, and counts as often as the step runs it. Steps and
products take turns, so that both meet the machine in the same state. A short product
is timed in a loop inside of one program, as the step's layers are, and the cost of
calling a program is taken off. Products find their operands in the cache more often
than the step does, which makes the ideal shorter, never longer.
"""

import collections
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from scripts.bench.hlo import Dimensions, Operand, Product
from scripts.bench.workers import Answer

DTYPES = {
    "f64": jnp.float64,
    "f32": jnp.float32,
    "bf16": jnp.bfloat16,
    "s8": jnp.int8,
    "s32": jnp.int32,
}
REPEATS = 3
"""Calls of a product's program in one round."""

CALL_FLOPS = 1_000_000_000
MOST_LOOPS = 256
"""A program runs its product until it has done so many FLOPs, at most so often."""


class Work(NamedTuple):
    """What makes two products the same work."""

    operands: tuple[Operand, Operand, Operand]
    dimensions: Dimensions


def distinct(products: Sequence[Product]) -> dict[Work, tuple[Product, int]]:
    """The different products, one of each, and the runs of all that are like it."""
    found: dict[Work, tuple[Product, int]] = {}
    for product in products:
        work = Work(product.operands, product.dimensions)
        _, runs = found.get(work, (product, 0))
        found[work] = (product, runs + product.runs)
    return found


def time_products(
    products: Sequence[Product], step: Callable[[], float], rounds: int
) -> Answer:
    """Times a step's products alone, a round of them after every step.

    Args:
      products: of the compiled step.
      step: does one and returns its seconds.
      rounds: how many of each.

    Returns:
      `step`: median seconds of the step; `plain` and `batched`: seconds of all runs of
      its products, of two matrices or of many; `products`: each distinct one.
    """
    works = distinct(products)
    random = np.random.default_rng(0)
    loops = {work: loops_of(product) for work, (product, _) in works.items()}
    calls = {work: prepare(work, loops[work], random) for work in works}
    empty = prepare_empty()
    steps: list[float] = []
    seconds: dict[Any, list[float]] = collections.defaultdict(list)
    for _ in range(rounds):
        steps.append(step())
        seconds["empty"] += [_timed(empty) for _ in range(REPEATS)]
        for work, call in calls.items():
            seconds[work] += [_timed(call) for _ in range(REPEATS)]
    cost = statistics.median(seconds["empty"])
    rows: list[Answer] = [
        {
            "shapes": product.shapes,
            "batched": product.batched,
            "runs": runs,
            "flops": product.flops,
            "seconds": max(statistics.median(seconds[work]) - cost, 0.0) / loops[work],
        }
        for work, (product, runs) in works.items()
    ]
    sums = {True: 0.0, False: 0.0}
    for row in rows:
        sums[row["batched"]] += row["runs"] * row["seconds"]
    return {
        "step": statistics.median(steps),
        "plain": sums[False],
        "batched": sums[True],
        "products": rows,
    }


def _timed(call: Callable[[], Array]) -> float:
    started = time.perf_counter()
    call().block_until_ready()
    return time.perf_counter() - started


def loops_of(product: Product) -> int:
    """How often a program runs the product, for a call to take long enough."""
    return max(1, min(MOST_LOOPS, CALL_FLOPS // max(product.flops, 1)))


def prepare(work: Work, loops: int, random: np.random.Generator) -> Callable[[], Array]:
    """A compiled loop of a product on random operands, which has run once."""
    left, right, result = (_random(random, operand) for operand in work.operands)
    program = looped(work, loops)
    written = [left, result]

    def call() -> Array:
        written[:] = program(written[0], right, written[1])
        return written[1]

    call().block_until_ready()
    return call


def looped(work: Work, loops: int) -> jax.stages.Wrapped:
    """A program that runs a product so often: `f(left, right, result)`.

    It gives the left operand and the result back, for the next call. The result is
    written over the one before, as a step's products write to memory that it has:
    fresh pages would be most of the time of a large result.
    """
    left, right, result = work.operands

    def product(left_stored: Array, right_stored: Array) -> Array:
        made = lax.dot_general(
            _as_seen(left_stored, left),
            _as_seen(right_stored, right),
            work.dimensions,
            preferred_element_type=DTYPES[result.dtype],
        )
        return jnp.transpose(made, result.order)

    def program(left_stored: Array, right_stored: Array, written_over: Array):
        def again(_: Array, carried: tuple[Array, Array]) -> tuple[Array, Array]:
            # One number of each result goes into the next product, or the compiler
            # would take the product out of the loop.
            changed, before = carried
            first = jnp.clip(before.ravel()[0], -1, 1).astype(changed.dtype)
            changed = changed.at[(0,) * changed.ndim].set(first)
            return changed, product(changed, right_stored)

        return lax.fori_loop(0, loops, again, (left_stored, written_over))

    return jax.jit(program, donate_argnums=(0, 2), keep_unused=True)


def prepare_empty() -> Callable[[], Array]:
    """A call that computes next to nothing, which has run once."""
    one = jnp.ones(())
    compiled = jax.jit(lambda x: x + 1)

    def call() -> Array:
        return compiled(one)

    call().block_until_ready()
    return call


def _random(random: np.random.Generator, operand: Operand) -> Array:
    """Random numbers in the shape in which the operand lies in memory."""
    stored = [operand.shape[i] for i in operand.order]
    return jnp.asarray(random.standard_normal(stored), DTYPES[operand.dtype])


def _as_seen(stored: Array, operand: Operand) -> Array:
    """The operand in the shape that the product sees; no number is moved."""
    return jnp.transpose(stored, np.argsort(operand.order).tolist())
