"""A function of weights that are not in memory, run forth and back."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from prompt_tuning.core.parameters import Parameters
from prompt_tuning.streaming.layered_weights import LayerReader
from prompt_tuning.streaming.traced_program import Leaves, TracedProgram


class StreamedFunction:
    """A function of a model's parameters, whose layers are brought in one by one.

    It is traced and compiled once for each shape of its arguments.

    Attributes:
      reader: brings the layers in.
    """

    def __init__(self, function: Callable[..., Any], reader: LayerReader | None = None):
        """Wraps a function.

        Args:
          function: of trained parameters, frozen ones, and any trees of arrays; gives
            a tree of arrays. It reads streamed parameters in loops over their layers.
          reader: one of its own by default.
        """
        self._function, self.reader = function, reader or LayerReader()
        self._programs: dict[Any, TracedProgram] = {}

    def forward(self, trained: Parameters, frozen: Leaves, *arguments: Any) -> Any:
        """The function's result."""
        program = self._program(trained, frozen, arguments)
        known = program.input_values(trained, frozen, arguments)
        program.forward([known], self.reader)
        return program.result(known)

    def value_and_gradient(
        self,
        trained: Parameters,
        frozen: Leaves,
        micro_batches: Sequence[tuple[Any, ...]],
        output_gradients: Sequence[Any],
    ) -> tuple[Parameters, list[Any]]:
        """Runs micro-batches forth, and the gradients at their results back.

        All of them run through a layer while it is on the device.

        Args:
          trained: what is differentiated.
          frozen: what is not.
          micro_batches: the other arguments of each, of one shape.
          output_gradients: at the results of each, trees as the function gives.

        Returns:
          the gradient of the trained parameters, micro-batches added up, and the
          result of each.
        """
        program = self._program(trained, frozen, micro_batches[0])
        known = [program.input_values(trained, frozen, own) for own in micro_batches]
        entered = program.forward(known, self.reader, keep=True)
        turned = [
            program.start_backward(own, seeds)
            for own, seeds in zip(known, output_gradients, strict=True)
        ]
        cotangents = [of_own for _, of_own in turned]
        program.backward(known, cotangents, entered, self.reader)
        results = [result for result, _ in turned]
        return program.gradient(trained, cotangents), results

    def _program(
        self, trained: Parameters, frozen: Leaves, arguments: tuple[Any, ...]
    ) -> TracedProgram:
        leaves, structure = jax.tree.flatten((trained, frozen, arguments))
        kinds = (structure, *((np.shape(leaf), _dtype(leaf)) for leaf in leaves))
        if kinds not in self._programs:
            program = TracedProgram(self._function, trained, frozen, arguments)
            self._programs[kinds] = program
        return self._programs[kinds]


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else np.result_type(leaf)


@functools.lru_cache(maxsize=4)
def stream_over_batches(
    graph: nnx.GraphDef, function: Callable[[nnx.GraphDef, Any, Any], Any]
) -> StreamedFunction:
    """A function of a model's structure, all of its parameters and a batch.

    It is kept with its programs, so that an evaluation finds those of the one before.
    """

    def run(trained: Parameters, frozen: Leaves, batch: Any) -> Any:
        return function(graph, trained | frozen, batch)

    return StreamedFunction(run)
