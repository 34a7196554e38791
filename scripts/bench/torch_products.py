"""Times matrix products by torch, in a process that answers `workers` questions.

    python -m scripts.bench.torch_products

Does not import JAX. Without torch it answers that it has none.
"""

# Torch is in the `bench` extra only.
# pyright: reportMissingImports=false

import importlib.util
from collections.abc import Sequence
from typing import Any

from scripts.bench.matrix_products import (
    OPERAND_LAYOUTS,
    Call,
    Layout,
    Library,
    MatrixSize,
    draw,
    stored_shapes,
)
from scripts.bench.workers import THREADS, Answer, serve


def main() -> None:
    """Answers questions until standard input ends."""
    products = TorchProducts()
    serve(
        {
            "open": products.open,
            "round": products.round,
            "medians": products.medians,
        }
    )


class TorchProducts:
    """The products, or none if torch is not installed."""

    def __init__(self) -> None:
        self._library: Library | None = None

    def open(self, sizes: Sequence[Sequence[Any]]) -> Answer:
        """Prepares the products; returns whether torch is installed."""
        if importlib.util.find_spec("torch") is None:
            return {"installed": False}
        import torch

        torch.set_num_threads(THREADS)
        self._library = Library(
            [MatrixSize(*size) for size in sizes], prepare_torch, OPERAND_LAYOUTS
        )
        return {"installed": True}

    def round(self) -> Answer:
        """Times every product once more."""
        assert self._library is not None
        self._library.round()
        return {}

    def medians(self) -> Answer:
        """Returns the median seconds of one run of each product."""
        assert self._library is not None
        return {"seconds": self._library.medians()}


def prepare_torch(size: MatrixSize, layout: Layout) -> Call:
    """Prepares a product by torch."""
    import torch

    left, right, result = (
        tensor.transpose(-1, -2) if exchanged else tensor
        for tensor, exchanged in zip(
            map(torch.from_numpy, draw(stored_shapes(size, layout))),
            layout,
            strict=True,
        )
    )
    loops = size.loops

    def call() -> None:
        with torch.no_grad():
            for _ in range(loops):
                torch.matmul(left, right, out=result)

    return call


if __name__ == "__main__":
    main()
