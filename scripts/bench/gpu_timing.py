"""Times the steps of either side of the GPU benchmark; has only light imports."""

import statistics
import time
from collections.abc import Callable
from typing import Any

from scripts.bench.gpu_shapes import DecodingCase, GpuCase

STEPS, WARM_UP, SECONDS = 20, 2, 12.0


def time_steps(
    case: GpuCase, step: Callable[[], float], most: int = STEPS
) -> dict[str, Any]:
    """Runs steps until there are enough or the time is over.

    Args:
      case: what a step computes.
      step: runs one step and returns the loss.
      most: maximum number of timed steps; at least three are timed.

    Returns:
      the median and the spread of the seconds, the rate, and the first losses.
    """
    begun = time.perf_counter()
    losses = [step() for _ in range(WARM_UP)]
    first_steps = time.perf_counter() - begun
    times: list[float] = []
    while len(times) < most and (len(times) < 3 or sum(times) < SECONDS):
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    median = statistics.median(times)
    return {
        "title": case.title,
        "seconds": median,
        "steps": len(times),
        "spread": [min(times), max(times)],
        "first_steps_seconds": first_steps,
        "losses": losses,
        "tflops": case.flops() / median / 1e12,
    }


def time_rows(
    case: DecodingCase, rows: int, generate: Callable[[], object], most: int = 3
) -> dict[str, Any]:
    """Continues rows several times, after a first time that may compile.

    Args:
      case: the sizes.
      rows: number of rows.
      generate: continues all of them.
      most: number of timed calls.

    Returns:
      the median of the seconds, their spread, and the new tokens of a second.
    """
    begun = time.perf_counter()
    generate()
    first = time.perf_counter() - begun
    times = []
    for _ in range(most):
        begun = time.perf_counter()
        generate()
        times.append(time.perf_counter() - begun)
    median = statistics.median(times)
    return {
        "seconds": median,
        "spread": [min(times), max(times)],
        "first_seconds": first,
        "tokens_per_second": rows * case.new_tokens / median,
    }
