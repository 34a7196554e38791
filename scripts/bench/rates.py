"""Measures what the machine can do: rates of matrix products and of memory.

python -m scripts.bench.rates PEFT_PYTHON   # answers `workers` questions
"""

import statistics
import sys

import jax
import jax.numpy as jnp
import numpy as np

from scripts.bench.hlo import products
from scripts.bench.ideal import time_products
from scripts.bench.matrix_products import Call, timed
from scripts.bench.workers import Answer, serve

SQUARE = (2048, 2048)
HEADS = (128, 256, 64)
"""Operands of a batched product like that of attention: heads, positions, width."""

COPIED = 64 * 1024 * 1024
"""Number of float32 values of a copied array, more than a processor's caches hold."""


def main() -> None:
    """Answers questions until standard input ends."""
    python = sys.argv[1]
    serve({"measure": lambda rounds: measure(rounds, python)})


def measure(rounds: int, torch_python: str | None) -> Answer:
    """Measures both kinds of products by each library, and memory.

    Returns:
      `libraries`: by library and kind of product, see `time_products`;
      `memory_bytes_per_second`: bytes read and written.
    """
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (SQUARE, HEADS)]
    compiled = jax.jit(_two_products).lower(*shapes).compile()
    timings = time_products(products(compiled), lambda: 0.0, rounds, torch_python)
    return {
        "libraries": timings["libraries"],
        "memory_bytes_per_second": memory_rate(rounds),
    }


def _two_products(square: jax.Array, heads: jax.Array) -> tuple[jax.Array, jax.Array]:
    return square @ square, jnp.einsum("hqk,hsk->hqs", heads, heads)


def memory_rate(rounds: int) -> float:
    """Returns the bytes per second of a large copy, by XLA or NumPy."""
    values = np.ones(COPIED, np.float32)
    copied = np.empty_like(values)
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    held = [jnp.asarray(values)]

    def by_xla() -> None:
        held[0] = add(held[0]).block_until_ready()

    def by_numpy() -> None:
        np.copyto(copied, values)

    return max(2 * values.nbytes / _median(call, rounds) for call in (by_xla, by_numpy))


def _median(call: Call, rounds: int) -> float:
    call()
    return statistics.median(timed(call) for _ in range(rounds))


if __name__ == "__main__":
    main()
