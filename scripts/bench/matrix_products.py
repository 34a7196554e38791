"""Times float32 matrix products by one library, in their fastest layouts.

A product is `[B, M, K] x [B, K, N] -> [B, M, N]`, and each array may be stored with its
last two dimensions exchanged. This module has only light imports, so that a process
without JAX can use it.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

REPEATS = 3
"""Number of calls of a product in one round."""

TRIALS = 2
"""Number of calls that choose the fastest layout."""

CALL_FLOPS = 300_000_000
MOST_LOOPS = 256
"""A call repeats its product up to `CALL_FLOPS`, and at most `MOST_LOOPS` times."""


class MatrixSize(NamedTuple):
    """Sizes of a product.

    Attributes:
      batch: number of products `B`.
      rows: rows of the left matrix, `M`.
      depth: summed dimension `K`.
      columns: columns of the right matrix, `N`.
    """

    batch: int
    rows: int
    depth: int
    columns: int

    @property
    def flops(self) -> int:
        """FLOPs, two for each multiplication."""
        return 2 * self.batch * self.rows * self.depth * self.columns

    @property
    def loops(self) -> int:
        """Number of repetitions that make a call long enough to time."""
        return max(1, min(MOST_LOOPS, CALL_FLOPS // max(self.flops, 1)))


class Layout(NamedTuple):
    """Whether each array is stored with its last two dimensions exchanged."""

    left: bool
    right: bool
    result: bool


LAYOUTS = tuple(Layout(*flags) for flags in itertools.product((False, True), repeat=3))
OPERAND_LAYOUTS = tuple(layout for layout in LAYOUTS if not layout.result)
"""Layouts of BLAS: a transposed result is the product of the exchanged operands."""

Call = Callable[[], object]
Prepare = Callable[[MatrixSize, Layout], Call]
"""Returns a function that runs a product `loops` times and waits for the result."""


class Library:
    """Products of one library, each in its fastest layout.

    Attributes:
      layouts: the layout of each product, fixed by a few trials.
      seconds: seconds of each call of each product, in the order of the rounds.
    """

    def __init__(
        self,
        sizes: Sequence[MatrixSize],
        prepare: Prepare,
        layouts: Sequence[Layout],
        overhead: Call | None = None,
    ):
        """Tries the layouts of every product.

        Args:
          sizes: sizes of the products.
          prepare: prepares a product.
          layouts: layouts to try.
          overhead: a call that does nothing else, whose time is subtracted.
        """
        self._sizes, self._overhead = sizes, overhead
        chosen = [fastest(size, prepare, layouts) for size in sizes]
        self.layouts = [layout for layout, _ in chosen]
        self._calls = [call for _, call in chosen]
        self.seconds: list[list[float]] = [[] for _ in sizes]
        self._overheads: list[float] = []

    def round(self) -> None:
        """Times every product."""
        if self._overhead is not None:
            self._overheads += timed_warm(self._overhead)
        for call, seconds in zip(self._calls, self.seconds, strict=True):
            seconds += timed_warm(call)

    def medians(self) -> list[float]:
        """Returns the median seconds of one run of each product."""
        cost = statistics.median(self._overheads) if self._overheads else 0.0
        return [
            max(statistics.median(seconds) - cost, 0.0) / size.loops
            for size, seconds in zip(self._sizes, self.seconds, strict=True)
        ]


def fastest(
    size: MatrixSize, prepare: Prepare, layouts: Sequence[Layout]
) -> tuple[Layout, Call]:
    """Finds the layout in which a product takes the least time."""
    best: tuple[float, Layout, Call] | None = None
    for layout in layouts:
        call = prepare(size, layout)
        call()
        seconds = min(timed(call) for _ in range(TRIALS))
        if best is None or seconds < best[0]:
            best = seconds, layout, call
    assert best is not None, "no layouts"
    return best[1:]


def timed_warm(call: Call) -> list[float]:
    """Returns the seconds of `REPEATS` calls, after one that is not timed.

    The first call after a pause or another library takes up to twice as long: threads
    sleep, and the caches hold other data.
    """
    call()
    return [timed(call) for _ in range(REPEATS)]


def timed(call: Call) -> float:
    """Returns the seconds of a call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def stored_shapes(size: MatrixSize, layout: Layout) -> list[tuple[int, ...]]:
    """Returns the shapes in memory of the operands and the result.

    A single product has no batch dimension: libraries run it by another kernel.
    """
    batch, rows, depth, columns = size
    matrices = ((rows, depth), (depth, columns), (rows, columns))
    lead = (batch,) if batch > 1 else ()
    return [
        lead + (shape[::-1] if exchanged else shape)
        for shape, exchanged in zip(matrices, layout, strict=True)
    ]


def draw(shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Draws random arrays, float32."""
    random = np.random.default_rng(0)
    return [random.random(shape, np.float32) - np.float32(0.5) for shape in shapes]


def prepare_numpy(size: MatrixSize, layout: Layout) -> Call:
    """Prepares a product by NumPy's BLAS."""
    left, right, result = (
        np.swapaxes(array, -1, -2) if exchanged else array
        for array, exchanged in zip(
            draw(stored_shapes(size, layout)), layout, strict=True
        )
    )
    loops = size.loops

    def call() -> None:
        for _ in range(loops):
            np.matmul(left, right, out=result)

    return call
