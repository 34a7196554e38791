"""Compares projections computed one by one with one product of their joined weights.

    python -m scripts.bench.fused_projections

Query, key and value read the same input, as do gate and up, so their weights could be
joined when they are loaded. Every block splits the joined output and joins the
gradients again, because attention and activation need the parts. Both sides take turns
in one process.
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from scripts.bench.machine import processor

BLOCKS = 4
TURNS = 100


class Projections(NamedTuple):
    """Projections of one input.

    Attributes:
      name: what is printed.
      positions: number of positions `n`.
      width: width `D` of the input.
      widths: width of each output.
    """

    name: str
    positions: int
    width: int
    widths: tuple[int, ...]


CASES = (
    Projections("tiny: query, key, value", 276, 128, (128, 128, 128)),
    Projections("tiny: gate, up", 276, 128, (344, 344)),
    Projections("Llama: query, key, value", 612, 512, (512, 512, 512)),
    Projections("Llama: gate, up", 612, 512, (1376, 1376)),
)


def main() -> None:
    """Prints the median times of both sides."""
    print(processor())
    for case in CASES:
        separate, joined = measure(case)
        print(
            f"{case.name}: separate {1e3 * separate:.2f} ms, joined "
            f"{1e3 * joined:.2f} ms, ratio {separate / joined:.2f}"
        )


def measure(case: Projections) -> tuple[float, float]:
    """Returns the median seconds of both passes, separate and joined."""
    key = jax.random.key(0)
    x = jax.random.normal(key, (case.positions, case.width))
    kernels = [jax.random.normal(key, (BLOCKS, case.width, w)) for w in case.widths]
    joined = jnp.concatenate(kernels, -1)
    sides = (
        (jax.jit(run_separate), (x, kernels)),
        (jax.jit(functools.partial(run_joined, case.widths)), (x, joined)),
    )
    turns = [[_seconds(*side) for side in sides] for _ in range(TURNS + 1)][1:]
    separate, joined = zip(*turns, strict=True)
    return statistics.median(separate), statistics.median(joined)


def run_separate(
    x: Float[Array, "n D"], kernels: list[Float[Array, "L D _"]]
) -> Float[Array, "n D"]:
    """Runs blocks whose projections are products of their weights alone."""

    def block(x, kernels):
        outputs = [jnp.tanh(x @ kernel) for kernel in kernels]
        gradient = sum(y @ kernel.T for y, kernel in zip(outputs, kernels, strict=True))
        return x + 1e-3 * gradient, None

    return jax.lax.scan(block, x, kernels)[0]


def run_joined(
    widths: Sequence[int], x: Float[Array, "n D"], joined: Float[Array, "L D W"]
) -> Float[Array, "n D"]:
    """Runs blocks whose projections are parts of one product."""
    ends = np.cumsum(widths)[:-1]

    def block(x, joined):
        outputs = [jnp.tanh(y) for y in jnp.split(x @ joined, ends, axis=-1)]
        return x + 1e-3 * (jnp.concatenate(outputs, -1) @ joined.T), None

    return jax.lax.scan(block, x, joined)[0]


def _seconds(run: Callable[..., Array], inputs: tuple[object, ...]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run(*inputs))
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
