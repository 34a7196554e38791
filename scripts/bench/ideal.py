"""Times the matrix products of a step without the rest of the step.

Each distinct product of the compiled step is timed alone: with the layout and the
kernel of the step, and at its best by XLA in other layouts, by NumPy's BLAS and by
torch. The ideal time of a step is the sum of the fastest of these, each multiplied by
its number of runs in the step. Steps and products take turns, so that both see the
machine in the same state. A short product is repeated within one call, like the layers
of the step, and the cost of calling a program is subtracted. The operands of a lone
product are in the processor's cache more often than in a step, which can make the ideal
time too short but not too long.
"""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from scripts.bench.hlo import Dimensions, Operand, Product
from scripts.bench.matrix_products import (
    CALL_FLOPS,
    LAYOUTS,
    MOST_LOOPS,
    OPERAND_LAYOUTS,
    Call,
    Layout,
    Library,
    MatrixSize,
    prepare_numpy,
    stored_shapes,
    timed_warm,
)
from scripts.bench.workers import Answer, Worker

DTYPES = {
    "f64": jnp.float64,
    "f32": jnp.float32,
    "bf16": jnp.bfloat16,
    "s8": jnp.int8,
    "s32": jnp.int32,
}
STEP, XLA, NUMPY, TORCH = "step", "xla", "numpy", "torch"
"""Ways to compute a product; "step" is XLA's kernel in the layout of the step."""

SPIN = 0.05
"""Seconds after a library's products, in which its idle threads stop spinning."""


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
    products: Sequence[Product],
    step: Callable[[], float],
    rounds: int,
    torch_python: str | None = None,
) -> Answer:
    """Times a step's products alone, one round after every step.

    Args:
      products: products of the compiled step.
      step: runs one step and returns its seconds.
      rounds: number of steps, and of rounds of products.
      torch_python: interpreter that may have torch; None to leave torch out.

    Returns:
      `step`: median seconds of the step; `plain` and `batched`: seconds of all runs of
      its products without and with batch dimensions, each by the fastest library;
      `products`: each distinct product, `seconds` in the layout of the step, and
      `library_seconds`; `libraries`: by library (`step` is XLA in the layout of the
      step) and kind of product, total `seconds` and `flops_per_second`.
    """
    works = distinct(products)
    steps: list[float] = []
    with Alternatives(works, torch_python) as alternatives:
        own = StepProducts(works)
        for _ in range(rounds):
            steps.append(step())
            own.round()
            alternatives.round()
        seconds = own.medians()
        others = alternatives.medians()
    rows: list[Answer] = [
        {
            "shapes": product.shapes,
            "batched": product.batched,
            "runs": runs,
            "flops": product.flops,
            "seconds": seconds[work],
            "library_seconds": {STEP: seconds[work], **others.get(size_of(work), {})},
        }
        for work, (product, runs) in works.items()
    ]
    return {
        "step": statistics.median(steps),
        **ideal_sums(rows),
        "products": rows,
        "libraries": library_sums(rows),
    }


def ideal_sums(rows: Sequence[Answer]) -> dict[str, float]:
    """Returns the seconds of all products by the fastest library, by kind."""
    sums = {"plain": 0.0, "batched": 0.0}
    for row in rows:
        fastest = min(row["library_seconds"].values())
        sums["batched" if row["batched"] else "plain"] += row["runs"] * fastest
    return sums


def library_sums(rows: Sequence[Answer]) -> dict[str, dict[str, Answer]]:
    """Returns the total seconds and the FLOP/s of each library, by kind of product.

    A library that lacks a product of a kind is left out.
    """
    sums: dict[str, dict[str, Answer]] = {}
    for name in (STEP, XLA, NUMPY, TORCH):
        for kind in ("plain", "batched"):
            chosen = [row for row in rows if row["batched"] == (kind == "batched")]
            if not chosen or any(name not in row["library_seconds"] for row in chosen):
                continue
            seconds = sum(row["runs"] * row["library_seconds"][name] for row in chosen)
            flops = sum(row["runs"] * row["flops"] for row in chosen)
            rate = flops / seconds if seconds else math.inf
            sums.setdefault(name, {})[kind] = {
                "seconds": seconds,
                "flops_per_second": rate,
            }
    return sums


class StepProducts:
    """Products with the layouts of the step."""

    def __init__(self, works: Mapping[Work, tuple[Product, int]]):
        random = np.random.default_rng(0)
        self._loops = {work: loops_of(product) for work, (product, _) in works.items()}
        self._calls = {
            work: prepare(work, loops, random) for work, loops in self._loops.items()
        }
        self._empty = prepare_empty()
        self._seconds: dict[Work, list[float]] = {work: [] for work in works}
        self._overheads: list[float] = []

    def round(self) -> None:
        """Times every product."""
        self._overheads += timed_warm(self._empty)
        for work, call in self._calls.items():
            self._seconds[work] += timed_warm(call)

    def medians(self) -> dict[Work, float]:
        """Returns the median seconds of one run of each product."""
        cost = statistics.median(self._overheads)
        return {
            work: max(statistics.median(seconds) - cost, 0.0) / self._loops[work]
            for work, seconds in self._seconds.items()
        }


class Alternatives:
    """The same float32 products by each library; torch runs in another process.

    Use it as a context manager: torch's process ends with the block.
    """

    def __init__(self, works: Mapping[Work, object], torch_python: str | None):
        self._stack = contextlib.ExitStack()
        sizes = (size_of(work) for work in works if is_float32(work))
        self._sizes = list(dict.fromkeys(sizes))
        self._libraries = {
            XLA: Library(self._sizes, prepare_xla, LAYOUTS, prepare_empty()),
            NUMPY: Library(self._sizes, prepare_numpy, OPERAND_LAYOUTS),
        }
        self._torch = None if torch_python is None else self._open_torch(torch_python)

    def __enter__(self) -> "Alternatives":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _open_torch(self, python: str) -> Worker | None:
        """Starts torch's process; returns None if it has no torch."""
        command = [python, "-m", "scripts.bench.torch_products"]
        worker = self._stack.enter_context(Worker("torch's products", command))
        return worker if worker.ask("open", sizes=self._sizes)["installed"] else None

    def round(self) -> None:
        """Times every product by every library."""
        for library in self._libraries.values():
            library.round()
            time.sleep(SPIN)
        if self._torch is not None:
            self._torch.ask("round")
            time.sleep(SPIN)

    def medians(self) -> dict[MatrixSize, dict[str, float]]:
        """Returns the median seconds of one run of each product, by library."""
        medians = {name: library.medians() for name, library in self._libraries.items()}
        if self._torch is not None:
            medians[TORCH] = self._torch.ask("medians")["seconds"]
        return {
            size: {name: seconds[i] for name, seconds in medians.items()}
            for i, size in enumerate(self._sizes)
        }


def is_float32(work: Work) -> bool:
    """Returns whether all arrays of a product are float32."""
    return all(operand.dtype == "f32" for operand in work.operands)


def size_of(work: Work) -> MatrixSize:
    """Returns a product's sizes, with its dimensions of each kind as one."""
    left, right, result = (math.prod(operand.shape) for operand in work.operands)
    shape = work.operands[0].shape
    batch = math.prod(shape[i] for i in work.dimensions.batch[0])
    depth = math.prod(shape[i] for i in work.dimensions.contracting[0])
    rows, columns = left // (batch * depth), right // (batch * depth)
    assert result == batch * rows * columns, work
    return MatrixSize(batch, rows, depth, columns)


def prepare_xla(size: MatrixSize, layout: Layout) -> Call:
    """Prepares a product by XLA, as the operands are stored."""
    return prepare(stored_work(size, layout), size.loops, np.random.default_rng(0))


def stored_work(size: MatrixSize, layout: Layout) -> Work:
    """Returns a product of stored matrices; all dimensions are in memory order.

    A transposed result is the product of the exchanged operands.
    """
    left, right, result = stored_shapes(size, layout)
    lead = len(left) - 2
    batch = tuple(range(lead))
    summed = (lead + 1 - layout.left, lead + layout.right)
    operands = [left, right]
    if layout.result:
        operands, summed = operands[::-1], summed[::-1]
    arrays = (
        Operand("f32", shape, tuple(range(len(shape)))) for shape in (*operands, result)
    )
    dimensions = Dimensions(((summed[0],), (summed[1],)), (batch, batch))
    return Work((*arrays,), dimensions)  # pyright: ignore[reportArgumentType]


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
        return written[1].block_until_ready()

    call()
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
        return compiled(one).block_until_ready()

    call()
    return call


def _random(random: np.random.Generator, operand: Operand) -> Array:
    """Draws random numbers in the operand's shape in memory."""
    stored = [operand.shape[i] for i in operand.order]
    values = random.random(stored, np.float32) - np.float32(0.5)
    return jnp.asarray(values, DTYPES[operand.dtype])


def _as_seen(stored: Array, operand: Operand) -> Array:
    """Transposes a stored operand to the product's shape, without moving data."""
    return jnp.transpose(stored, np.argsort(operand.order).tolist())
