"""Times the matrix products of a step without the rest of the step.

Each distinct product of the compiled step is timed alone, with the layout and the
kernel of the step, and is multiplied by its number of runs in the step. Steps and
products take turns, so that both see the machine in the same state. A short product is
timed in a loop within one program, like the layers of the step, and the cost of calling
a program is subtracted. The operands of a lone product are in the processor's cache
more often than in a step, which can make the ideal time too short but not too long.
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
"""Number of calls of a product's program in one round."""

CALL_FLOPS = 1_000_000_000
MOST_LOOPS = 256
"""A program repeats its product up to `CALL_FLOPS`, and at most `MOST_LOOPS` times."""


class Work(NamedTuple):
    """Properties that two products share if they do the same work."""

    operands: tuple[Operand, Operand, Operand]
    dimensions: Dimensions


def distinct(products: Sequence[Product]) -> dict[Work, tuple[Product, int]]:
    """Groups equal products: one of each group, and the total number of runs."""
    groups: dict[Work, tuple[Product, int]] = {}
    for product in products:
        work = Work(product.operands, product.dimensions)
        _, runs = groups.get(work, (product, 0))
        groups[work] = (product, runs + product.runs)
    return groups


def time_products(
    products: Sequence[Product], step: Callable[[], float], rounds: int
) -> Answer:
    """Times a step's products alone, one round after every step.

    Args:
      products: products of the compiled step.
      step: runs one step and returns its seconds.
      rounds: number of steps, and of rounds of products.

    Returns:
      `step`: median seconds of the step; `plain` and `batched`: seconds of all runs of
      its products without and with batch dimensions; `products`: each distinct product.
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
    """Returns the number of repetitions that make a call long enough to time."""
    return max(1, min(MOST_LOOPS, CALL_FLOPS // max(product.flops, 1)))


def prepare(work: Work, loops: int, random: np.random.Generator) -> Callable[[], Array]:
    """Compiles a loop of a product on random operands and runs it once."""
    left, right, result = (_random(random, operand) for operand in work.operands)
    program = looped(work, loops)
    written = [left, result]

    def call() -> Array:
        written[:] = program(written[0], right, written[1])
        return written[1]

    call().block_until_ready()
    return call


def looped(work: Work, loops: int) -> jax.stages.Wrapped:
    """Builds a program `f(left, right, result)` that runs a product `loops` times.

    It returns the left operand and the result for the next call. The result overwrites
    the previous one, because a step's products write to memory that is already mapped:
    fresh pages would take most of the time of a large result.
    """
    left, right, result = work.operands

    def product(left_stored: Array, right_stored: Array) -> Array:
        product_ = lax.dot_general(
            _as_seen(left_stored, left),
            _as_seen(right_stored, right),
            work.dimensions,
            preferred_element_type=DTYPES[result.dtype],
        )
        return jnp.transpose(product_, result.order)

    def program(left_stored: Array, right_stored: Array, written_over: Array):
        def again(_: Array, carried: tuple[Array, Array]) -> tuple[Array, Array]:
            # The next product depends on one number of this result; otherwise the
            # compiler would move the product out of the loop.
            changed, before = carried
            first = jnp.clip(before.ravel()[0], -1, 1).astype(changed.dtype)
            changed = changed.at[(0,) * changed.ndim].set(first)
            return changed, product(changed, right_stored)

        return lax.fori_loop(0, loops, again, (left_stored, written_over))

    return jax.jit(program, donate_argnums=(0, 2), keep_unused=True)


def prepare_empty() -> Callable[[], Array]:
    """Compiles a program that computes almost nothing, and runs it once."""
    one = jnp.ones(())
    compiled = jax.jit(lambda x: x + 1)

    def call() -> Array:
        return compiled(one)

    call().block_until_ready()
    return call


def _random(random: np.random.Generator, operand: Operand) -> Array:
    """Draws random numbers in the operand's shape in memory."""
    stored = [operand.shape[i] for i in operand.order]
    return jnp.asarray(random.standard_normal(stored), DTYPES[operand.dtype])


def _as_seen(stored: Array, operand: Operand) -> Array:
    """Transposes a stored operand to the product's shape, without moving data."""
    return jnp.transpose(stored, np.argsort(operand.order).tolist())
